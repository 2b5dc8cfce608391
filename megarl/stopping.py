"""Ending a rank on request, also while it waits inside a collective.

Python runs signal handlers only between bytecodes of the main thread, which may sit in a C++ wait
for minutes. The C level handler writes the signal's number to a pipe at once; a thread reads it
there. The loop asks ``requested`` at every step, finishes it, saves and ends. What has not ended
``grace_s`` later, or at a second signal, is ended here: first what must not outlive the rank
(``on_end``), then the process.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

import psutil

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Slurm signals every process of a step, and torchrun hands its own signal on: one request, twice.
_SAME_S = 1.0


class StopRequest:
    """One a process; made in the main thread. ``where`` is what the rank is doing, for error
    messages.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.where = "start"
        self.requested = False
        self.exit_code = 0
        self.finished = False
        self._on_end: list[Callable[[], None]] = []
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        for number in SIGNALS:  # the pipe does the work; the default would end us here
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="stop-watch", daemon=True).start()

    def on_end(self, action: Callable[[], None]) -> None:
        """Run ``action`` before the process is ended from here, e.g. stop a server it started."""
        self._on_end.append(action)

    def fail(self, code: int, delay_s: float) -> None:
        """End the process in ``delay_s`` unless it has ended itself: something it depends on is
        gone.
        """
        timer = threading.Timer(delay_s, self._end, args=(code,))
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """The run is over: run what must not outlive it; later signals change nothing."""
        self.finished = True
        for action in self._on_end:
            try:
                action()
            except Exception:
                log.exception("while ending")
        self._on_end.clear()
        for child in psutil.Process().children(recursive=True):  # by pid: ours, whatever they are
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def _watch(self) -> None:
        first, since = 0, 0.0
        while True:
            number = os.read(self._read, 1)[0]
            if number not in SIGNALS or self.finished:
                continue
            if number == first and time.monotonic() - since < _SAME_S:
                continue
            if self.requested:
                self._end(128 + number)
            first, since = number, time.monotonic()
            self.requested = True
            self.exit_code = 128 + number
            log.warning(
                "signal %d while in %s: ending within %g s", number, self.where, self.grace_s
            )
            self.fail(128 + number, self.grace_s)

    def _end(self, code: int) -> None:
        if self.finished:
            return
        self.close()
        logging.shutdown()
        os._exit(code)
