"""Fleets of a program that starts in a moment and misbehaves when told to (`standin.py`)."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.rollout.fleet import Fleet, ServerDeath, start_fleet
from megarl.rollout.process import lives
from megarl.rollout.watching import Hold
from megarl.rundir import RunDir
from megarl.types import Member
from tests.rollout.conftest import server_section

# A trainer in a push, in a process of its own: python -c HOLDS RUN_DIR.
HOLDS = """
import sys, time
from pathlib import Path
from megarl.rollout.mailbox import told_to_hold
from megarl.rundir import RunDir
with told_to_hold(RunDir(Path(sys.argv[1]))):
    print("holds", flush=True)
    time.sleep(300)
"""


class Site:
    """A run directory with a program that servers are started from."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run")
        self.program = folder / "standin.py"
        shutil.copy(Path(__file__).with_name("standin.py"), self.program)
        self.deaths: list[ServerDeath] = []
        self.words: list[str] = []

    def tell(self, name: str, text: str = "") -> None:
        (self.program.parent / name).write_text(text)

    def take_back(self, name: str) -> None:
        (self.program.parent / name).unlink()

    @contextmanager
    def fleet(
        self, *, restarts: int | None = 3, hold: Hold | None = None, **changes: Any
    ) -> Iterator[Fleet]:
        """`restarts` None: on_failure is stop."""
        started: dict[str, Any] = {
            "engine": "sglang",
            "server_command": (sys.executable, str(self.program)),
        }
        found = "urls" in changes or "discover" in changes
        section = server_section(
            **({} if found else started),
            **{"start_timeout_s": 20, "probe_every_s": 0.1, "probe_timeout_s": 3.0, **changes},
        )
        fleet = start_fleet(
            section,
            run_dir=self.run,
            model=self.run.root,
            dtype="fp32",
            on_death=self.deaths.append,
            on_failure="stop" if restarts is None else "restart",
            max_restarts=restarts or 0,
            progress=self.words.append,
            hold=hold,
        )
        try:
            yield fleet
        finally:
            pids = [server.process.pid for server in fleet.managed]
            fleet.close()
            assert not any(map(lives, pids))


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
    return found


def back(fleet: Fleet, old: Member) -> Member:
    """The member of that name, once it is another one."""

    def other() -> Member | None:
        found = [m for m in fleet.members() if m.name == old.name and m.boot != old.boot]
        return found[0] if found else None

    return until(other)
