"""Senders that send to the same servers over groups those servers share take turns.

Each server takes one bucket at a time. Were two senders to announce buckets at once, one server
would wait in the first one's broadcast and another in the second's, and both for ever. So a bucket
(and a joining) is one sender's turn: tickets, first come, first served. The others go on gathering
meanwhile.

A turn that fails tells those after it: they would wait for the same server, a deadline each.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch._C._distributed_c10d import Store

from megarl.errors import SyncError

_POLL_S = 0.002


class Turns:
    """One sender's view. ``store``: shared by all of them; a turn is waited for no longer than
    ``timeout_s``.
    """

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._round = ""

    def begin(self, name: str) -> None:
        """Another attempt: nobody has failed in it so far."""
        self._round = name

    @contextmanager
    def __call__(self) -> Iterator[bool]:
        """Inside it is this sender's turn; whether none has failed in this round before."""
        ticket = self._store.add("turns/taken", 1)
        self._wait(ticket - 1)
        try:
            yield self._store.add(self._failures, 0) == 0
        finally:
            self._store.add("turns/done", 1)

    def fail(self) -> None:
        self._store.add(self._failures, 1)

    @property
    def _failures(self) -> str:
        return f"turns/failed/{self._round}"

    def _wait(self, done: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (found := self._store.add("turns/done", 0)) < done:
            if time.monotonic() > deadline:
                raise SyncError(
                    f"weight sync: {done - found} other senders had their turn before this one, "
                    f"and did not end it within {self._timeout_s:g} s"
                )
            time.sleep(_POLL_S)
