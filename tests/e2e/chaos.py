"""Kills servers and collectors of a run while it works, each time for a reason that can be told."""

import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.conftest import Launch

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Chaos:
    """``kinds``: what to do, by weight. Every deed waits for its moment, at most ``patience_s``."""

    run: Launch
    rng: random.Random
    pause_s: tuple[float, float]
    kinds: dict[str, int]
    patience_s: float = 20.0
    deeds: list[str] = field(default_factory=list)

    def rage(self, deadline_s: float, most: int = 10**6) -> None:
        """Until the run has ended, or there were enough deeds."""
        deadline = time.monotonic() + deadline_s
        while self.run.process.poll() is None and len(self.deeds) < most:
            assert time.monotonic() < deadline, self.run.text()
            time.sleep(self.rng.uniform(*self.pause_s))
            kind = self.rng.choices(list(self.kinds), list(self.kinds.values()))[0]
            if DEEDS[kind](self):
                self.deeds.append(kind)

    # ---- deeds: True where it was done -------------------------------------------------------

    def kill_in_flight(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """One server, while every one has tokens in flight."""

        def ready() -> bool:
            servers = self.servers()
            return len(servers) > 1 and all(s["running"] for s in servers)

        return self.wait(ready) and self.signal(self.rng.choice(self.servers() or [{}]), number)

    def kill_syncing(self) -> bool:
        """A server that is taking weights."""
        if not self.wait(lambda: any(s["updating"] for s in self.servers())):
            return False
        syncing = [s for s in self.servers() if s["updating"]]
        return bool(syncing) and self.signal(self.rng.choice(syncing), signal.SIGKILL)

    def hang(self) -> bool:
        """A server that is alive and does nothing any more."""
        return self.kill_in_flight(signal.SIGSTOP)

    def kill_all(self) -> bool:
        servers = self.servers()
        return bool(servers) and all([self.signal(s, signal.SIGKILL) for s in servers])

    def kill_collector(self) -> bool:
        """It, or the one that watches over its rewards."""
        family = self.run.processes_of("megarl.rollout.collector_process")
        family.sort(key=lambda process: process.create_time())
        if not family:
            return False
        self.rng.choice(family[:2]).kill()
        return True

    # ---- the run -----------------------------------------------------------------------------

    def servers(self) -> list[dict[str, Any]]:
        """What each server that answers says of itself, with its pid."""
        found = []
        for file in sorted(self.run.run.glob("server_*.json")):
            try:
                told = json.loads(file.read_text())
                key = (self.run.run / "server.key").read_text().strip()
                request = urllib.request.Request(
                    f"{told['url']}/server_info", headers={"Authorization": f"Bearer {key}"}
                )
                with _OPENER.open(request, timeout=2) as reply:
                    found.append({**json.loads(reply.read()), "pid": told["pid"]})
            except (OSError, ValueError, KeyError):
                continue  # it is on its way down, or up
        return found

    def wait(self, ready: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline and self.run.process.poll() is None:
            if ready():
                return True
            time.sleep(0.01)
        return False

    @staticmethod
    def signal(server: dict[str, Any], number: signal.Signals) -> bool:
        try:
            os.kill(server["pid"], number)
        except (KeyError, ProcessLookupError):
            return False
        return True


DEEDS: dict[str, Callable[[Chaos], bool]] = {
    "kill in flight": Chaos.kill_in_flight,
    "kill syncing": Chaos.kill_syncing,
    "hang": Chaos.hang,
    "kill all": Chaos.kill_all,
    "kill collector": Chaos.kill_collector,
}
