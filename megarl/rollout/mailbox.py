"""What a trainer tells the supervisor of discovered servers, through the run directory.

* `servers.hold`: nobody is to be probed, weights are on their way. Written anew every second while
  that lasts, since whoever wrote it may have been killed: one that does not change is of the past.
* `server_LABEL.give_up`, {"boot", "reason"}: this process is of no use; start another.

A file system that stumbles is no reason to end a run: what could not be told is in the log.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.rundir import RunDir, write_json

log = logging.getLogger(__name__)

_BEAT_S = 1.0
_STALE_S = 10.0


def _hold_file(run_dir: RunDir) -> Path:
    return run_dir.root / "servers.hold"


def _give_up_file(run_dir: RunDir, label: str) -> Path:
    return run_dir.root / f"server_{label}.give_up"


@contextmanager
def told_to_hold(run_dir: RunDir) -> Iterator[None]:
    """Supervisors probe nobody inside."""
    file, done = _hold_file(run_dir), threading.Event()

    def beat() -> None:
        with _logged(file):
            write_json(file, {"beat": time.time_ns()})

    def run() -> None:
        while not done.wait(_BEAT_S):
            beat()

    beat()
    thread = threading.Thread(target=run, name="hold", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with _logged(file):
            file.unlink(missing_ok=True)


class HoldWatch:
    """The supervisor's side: whether a hold is on, by this machine's clock alone."""

    def __init__(self, run_dir: RunDir) -> None:
        self._file = _hold_file(run_dir)
        self._seen, self._since = self._read(), 0.0

    def on(self) -> bool:
        seen = self._read()
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        return bool(seen) and time.monotonic() - self._since < _STALE_S

    def _read(self) -> str:
        try:
            return self._file.read_text()
        except OSError:
            return ""


def ask_for_another(run_dir: RunDir, label: str, boot: str, reason: str) -> None:
    file = _give_up_file(run_dir, label)
    with _logged(file):
        write_json(file, {"boot": boot, "reason": reason})


def asked_for_another(run_dir: RunDir, label: str) -> tuple[str, str] | None:
    """(boot, reason), once, if a trainer has given the server up."""
    file = _give_up_file(run_dir, label)
    try:
        told = json.loads(file.read_text())
        asked = str(told["boot"]), str(told["reason"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: %r; removed", file, error)
        asked = None
    with _logged(file):
        file.unlink(missing_ok=True)
    return asked


@contextmanager
def _logged(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("%s: %s", file, error)
