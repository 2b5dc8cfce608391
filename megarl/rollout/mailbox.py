"""What a trainer tells the supervisor of discovered servers, through the run directory.

* `servers.hold`: nobody is to be probed, weights are on their way. Written anew every second while
  that lasts, since whoever wrote it may have been killed: one that does not change is of the past.
  It is removed after a push that went well; one that is left tells of servers left paused.
* `servers.hold.lock`: locked by the trainer for as long as a hold lasts, also while it stands still
  and writes nothing, and shared by supervisors while they tell servers to go on.
* `server_LABEL.give_up`, {"boot", "reason"}: this process is of no use; start another.

A file system that stumbles is no reason to end a run: what could not be told is in the log.
"""

import fcntl
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from megarl.rundir import RunDir, write_json

log = logging.getLogger(__name__)

_BEAT_S = 1.0
_STALE_S = 10.0
_LOCK_S = 10.0  # supervisors keep it for as long as `Probe.resume` takes


def _hold_file(run_dir: RunDir) -> Path:
    return run_dir.root / "servers.hold"


def _lock_file(run_dir: RunDir) -> Path:
    return run_dir.root / "servers.hold.lock"


def _give_up_file(run_dir: RunDir, label: str) -> Path:
    return run_dir.root / f"server_{label}.give_up"


@contextmanager
def told_to_hold(run_dir: RunDir) -> Iterator[None]:
    """Supervisors probe nobody inside, and tell nobody to go on."""
    with _locked(run_dir, fcntl.LOCK_EX, _LOCK_S) as locked:
        if not locked:
            log.warning("%s cannot be locked: servers may be told to go on", _lock_file(run_dir))
        with _beating(run_dir):
            yield


@contextmanager
def _beating(run_dir: RunDir) -> Iterator[None]:
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


@contextmanager
def _locked(run_dir: RunDir, kind: int, wait_s: float) -> Iterator[bool]:
    """Whether the lock was had within `wait_s`. The system lets go of it when a process ends."""
    file, handle = _lock_file(run_dir), None
    with _logged(file):
        handle = file.open("a")
    if handle is None:
        yield False
        return
    with handle:
        yield _took(handle, kind, time.monotonic() + wait_s)


def _took(handle: IO[str], kind: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        except OSError as error:  # not on this file system
            log.warning("%s: %s", handle.name, error)
            return False
        else:
            return True


class HoldWatch:
    """The supervisor's side: whether a hold is on, by this machine's clock alone. `on` is for one
    thread, which asks all the time; `left` for any.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir, self._file = run_dir, _hold_file(run_dir)
        self._begun = time.monotonic()
        self._last = self._read(), 0.0  # what was seen, and since when

    def on(self) -> bool:
        seen = self._read()
        if seen != self._last[0]:
            self._last = seen, time.monotonic()
        return bool(seen) and time.monotonic() - self._last[1] < _STALE_S

    @contextmanager
    def left(self) -> Iterator[bool]:
        """Whether a trainer was ended in the middle of a hold, and none is in one now. If so, none
        begins one inside."""
        with _locked(self._run_dir, fcntl.LOCK_SH, 0.0) as locked:
            yield locked and self._is_past()

    def _is_past(self) -> bool:
        seen, since = self._last
        unchanged_s = time.monotonic() - max(since, self._begun)
        return bool(seen) and seen == self._read() and unchanged_s >= _STALE_S

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
