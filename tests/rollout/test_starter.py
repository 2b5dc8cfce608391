"""What a managed SGLang server is told, so that it does what the settings say."""

import json
from pathlib import Path
from typing import Any

import pytest

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
