"""Ends of servers and supervisors that go another way than usual."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.config.rollout import RolloutSection
from megarl.errors import ServerError
from megarl.rollout import managed, supervisor
from megarl.rollout.managed import ManagedServer
from megarl.rundir import RunDir


@pytest.fixture
def handlers() -> Iterator[None]:
    """A supervisor takes signals for itself, in a process of its own."""
    before = {number: signal.getsignal(number) for number in supervisor._SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_supervisor_leaves_the_router_to_the_trainer(
    handlers: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start a second one, that nobody asks."""
    asked: list[RolloutSection] = []

    def start(section: RolloutSection, **given: Any) -> None:
        asked.append(section)
        raise ServerError("enough seen")

    monkeypatch.setattr(supervisor, "start_fleet", start)
    section = RolloutSection(
        engine="sglang", server_command=("sh",), router_command=("python", "-m", "router")
    )
    with pytest.raises(ServerError, match="enough seen"):
        supervisor.supervise(
            section,
            run_dir=RunDir(tmp_path),
            model=tmp_path,
            dtype="bf16",
            host="127.0.0.1",
            routing=False,
            max_restarts=1,
        )
    assert [(s.router_command, s.server_command) for s in asked] == [((), ("sh",))]


def test_who_does_not_end_even_when_killed_is_told_of_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a process that waits for a device."""
    monkeypatch.setattr(managed, "_KILL_S", 0.05)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(sleeper, start_new_session=True)
    try:
        server = ManagedServer("it", process, tmp_path / "log", 0, "key")
        with monkeypatch.context() as deaf:
            deaf.setattr(ManagedServer, "signal_group", lambda self, number: None)
            server.stop(grace_s=0.05)
        assert server.running and f"it (pid {process.pid}) does not end" in caplog.text
    finally:
        process.kill()
        process.wait()
