"""Words between trainers and supervisors get through, or it is said that they did not."""

import logging
from pathlib import Path

import pytest

from megarl.rollout.mailbox import HoldWatch, ask_for_another, asked_for_another, told_to_hold
from megarl.rundir import RunDir


def test_words_get_through_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    watch = HoldWatch(run)
    with told_to_hold(run):
        assert watch.on()
    assert not watch.on()
    ask_for_another(run, "a-0", "boot", "why")
    assert asked_for_another(run, "a-0") == ("boot", "why")
    assert asked_for_another(run, "a-0") is None


def test_a_file_system_that_stumbles_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path)
    for name in ("servers.hold", "server_a-0.give_up"):
        (tmp_path / name).mkdir()  # can be neither written, nor read, nor removed
    with caplog.at_level(logging.WARNING), told_to_hold(run):
        ask_for_another(run, "a-0", "boot", "why")
        assert asked_for_another(run, "a-0") is None
    for name in ("servers.hold", "server_a-0.give_up"):
        assert sum(name in record.getMessage() for record in caplog.records) >= 2
