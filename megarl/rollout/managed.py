"""A server as a process of ours: its group, its log, its end.

It is a process group of its own, logs to the run directory, and dies with us even if we are killed.
"""

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from megarl.rollout.process import child_environment

log = logging.getLogger(__name__)

TERM_S = 3.0
_KILL_S = 10.0  # a process that waits for a device or a file system may not end even then
_TAIL_BYTES = 3000


class ManagedServer:
    """One child process with its group, its log and its watcher."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log_file: Path, start: int, key: str
    ) -> None:
        """`start`: where in the log this process begins; restarts append to it."""
        self.name, self.process, self.log_file = name, process, log_file
        self._start, self._key = start, key
        self._ended = threading.Event()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def watch(self, on_end: Callable[[], None]) -> None:
        """Reaps the process when it ends, ends what it left behind, then calls `on_end` in a thread
        of its own."""

        def wait() -> None:
            # Without reaping at first: until then nobody else can get its group's number.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.signal_group(signal.SIGKILL)
            self.process.wait()
            self._ended.set()
            on_end()

        threading.Thread(target=wait, name=f"watch-{self.name}", daemon=True).start()

    def stop(self, grace_s: float = TERM_S) -> None:
        """SIGTERM, then SIGKILL after `grace_s`, to the whole group; waits for neither for ever."""
        self.signal_group(signal.SIGTERM)
        if not self._ended.wait(grace_s):
            self.signal_group(signal.SIGKILL)
            if not self._ended.wait(_KILL_S):
                log.error("%s (pid %d) does not end, killed as it is", self.name, self.process.pid)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def signal_group(self, number: signal.Signals) -> None:
        if self._ended.is_set():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def cause(self) -> str:
        """How it ended, with the end of its log."""
        code = self.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}; {self.last_words()}"

    def last_words(self) -> str:
        return f"end of {self.log_file}:\n{self.tail()}"

    def tail(self) -> str:
        """The end of this process's part of the log, without the key."""
        with self.log_file.open("rb") as file:
            file.seek(max(self._start, self.log_file.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").replace(self._key, "***").strip()

    def last_line(self) -> str:
        """For progress."""
        lines = self.tail().splitlines()
        return lines[-1][:160] if lines else "(it has said nothing yet)"


def spawn(
    name: str,
    command: Sequence[str],
    log_file: Path,
    key: str,
    mark: str,
    environment: Mapping[str, str] | None = None,
) -> ManagedServer:
    """Starts it; `mark` goes into the log before what it says, `environment` on top of ours. Not
    watched yet."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open_private(log_file) as output:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        output.write(f"---- {when} {name}: {mark}\n".encode())
        output.flush()
        start = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**child_environment(), **(environment or {})},
        )
    return ManagedServer(name, process, log_file, start, key)


def open_private(path: Path, mode: str = "a") -> IO[bytes]:
    """A file for its owner's eyes: what a server logs may tell more than it should."""
    kind = os.O_APPEND if mode == "a" else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | kind, 0o600), "wb")
