"""Words between trainers and supervisors get through, or it is said that they did not."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megarl.rollout import mailbox
from megarl.rollout.mailbox import HoldWatch, ask_for_another, asked_for_another, told_to_hold
from megarl.rundir import RunDir
from tests.rollout.fleets import HOLDS, until


def test_words_get_through_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    watch = HoldWatch(run)
    with told_to_hold(run):
        assert watch.on()
    assert not watch.on()
    ask_for_another(run, "a-0", "boot", "why")
    assert asked_for_another(run, "a-0") == ("boot", "why")
    assert asked_for_another(run, "a-0") is None


def left(watch: HoldWatch) -> bool:
    with watch.left() as it_is:
        return it_is


def test_only_the_hold_of_a_process_that_is_gone_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stands still writes as little as one that is gone, and may go on at any time."""
    monkeypatch.setattr(mailbox, "_STALE_S", 0.2)
    run = RunDir(tmp_path)
    watch = HoldWatch(run)
    assert not left(watch)
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "holds\n"
        until(watch.on)
        os.kill(trainer.pid, signal.SIGSTOP)
        until(lambda: not watch.on())
        time.sleep(0.3)
        assert not left(watch)
        trainer.kill()
    until(lambda: left(watch))
    newer = HoldWatch(run)
    assert not left(newer)  # it cannot know yet whether this one is written anew
    with told_to_hold(run):
        time.sleep(0.3)
        assert not left(watch) and not left(newer)
    assert not left(watch)


def test_a_hold_that_fails_is_left_and_none_begins_while_servers_are_told_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "_STALE_S", 0.2)
    run = RunDir(tmp_path)
    watch = HoldWatch(run)
    with pytest.raises(RuntimeError, match="in a push"), told_to_hold(run):
        raise RuntimeError("in a push")
    until(lambda: watch.on() is False and left(watch))
    order: list[str] = []

    def push() -> None:
        with told_to_hold(run):
            order.append("pauses")

    with watch.left() as it_is, watch.left() as for_another:  # supervisors do not wait for others
        assert it_is and for_another
        trainer = threading.Thread(target=push)
        trainer.start()
        time.sleep(0.3)
        order.append("went on")
    trainer.join()
    assert order == ["went on", "pauses"]


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
