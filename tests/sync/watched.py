"""Servers that are watched during a push, and struck in the middle of it."""

import contextlib
import json
import os
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

from megarl.rollout.control import ServerControl


@dataclass(frozen=True)
class Blow:
    """What happens to a server's process before the ``nth`` operation of one kind on it. One that
    is stopped first and gets the signal ``later_s`` afterwards dies with the operation under way.
    """

    op: str
    nth: int
    pid: int
    signal: Signals = SIGKILL
    later_s: float = 0.0

    def strike(self) -> None:
        if not self.later_s:
            with contextlib.suppress(ProcessLookupError):  # another sender's has ended it
                os.kill(self.pid, self.signal)
            return
        os.kill(self.pid, SIGSTOP)
        threading.Timer(self.later_s, os.kill, (self.pid, self.signal)).start()


class Watched(ServerControl):
    """A server that is asked for its version around every operation, and struck when its time has
    come.
    """

    patience_s = 1.0  # with its answers to that

    def __init__(
        self,
        url: str,
        key: str,
        name: str,
        boot: str,
        blow: Blow | None,
        ranks: int = 1,
        version: str = "",
        address: str = "",
    ) -> None:
        """``address``: by which it sees the trainer, if not the one it is reached from."""
        super().__init__(url, key, name, boot=boot, ranks=ranks, version=version)
        self.key, self.blow, self.address = key, blow, address
        self.seen: list[tuple[str, str, str]] = []  # what succeeded
        self._begun: list[str] = []

    @property
    def local_address(self) -> str:
        return self.address or super().local_address

    def control(self, op: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        before = self.version()
        nth = self._begun.count(op)
        self._begun.append(op)
        if self.blow is not None and (op, nth) == (self.blow.op, self.blow.nth):
            self.blow.strike()
        reply = super().control(op, payload, timeout_s)
        self.seen.append((op, before, self.version()))
        return reply

    def version(self) -> str:
        """ "gone" for a server that does not answer."""
        return str(self._told("/model_info").get("weight_version"))

    def state(self) -> dict[str, Any]:
        """What it says of itself."""
        return self._told("/server_info")

    def _told(self, path: str) -> dict[str, Any]:
        bearer = {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}{path}", headers=bearer)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.patience_s) as response:
                return dict(json.load(response))
        except OSError:
            return {"weight_version": "gone"}
