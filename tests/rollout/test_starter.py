"""What a managed SGLang server is told, so that it does what the settings say."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.managed import ManagedServer
from megarl.rollout.process import lives
from tests.rollout.fleets import Site


@pytest.mark.parametrize(
    ("settings", "free"),
    [({}, True), ({"pause_mode": "abort"}, True), ({"pause_mode": "in_place"}, False)],
    ids=str,
)
def test_sglang_has_room_for_the_longest_sequence_and_names_versions_right(
    tmp_path: Path, settings: dict[str, Any], free: bool
) -> None:
    """Of a context of C tokens it fills C - 2, and takes prompts up to C - 7 (asked of the real one
    in tests/sglang/test_contract.py): a prompt of 49 has to get its last of 50 tokens.
    """
    site = Site(tmp_path)
    with site.fleet(context_length=50, **settings):
        arguments = json.loads((tmp_path / "argv.json").read_text())
    context = int(arguments[arguments.index("--context-length") + 1])
    assert context - 7 >= 49 and context - 2 >= 50
    for flag in ("--disable-overlap-schedule", "--disable-radix-cache"):
        assert (flag not in arguments) == free


def test_a_server_that_cannot_be_told_of_is_ended(tmp_path: Path) -> None:
    """A full disk, say: else it would run on beside the next one, on the same devices."""
    site, spawned = Site(tmp_path), list[ManagedServer]()

    def spoil(server: ManagedServer) -> None:
        spawned.append(server)
        site.run.server("x").mkdir()

    with site.fleet() as fleet:
        starter = fleet.keepers[0]._starter  # type: ignore[union-attr]
        with pytest.raises(OSError):
            starter.start(0, "x", mark="start", spawned=spoil, ended=lambda server: None)
        assert not lives(spawned[0].process.pid)
