"""What workers do in tests of ``megarl/servers.py``: scenarios that every rank goes through, with a
fleet and collectors that write down what happens to them.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.errors import MegarlError, ServerError
from megarl.hostcomm import any_rank
from megarl.rollout.control import ServerControl
from megarl.servers import Servers
from megarl.types import Max, Member, Push, SyncReceipt
from tests.sync.watched import Watched
from tests.sync.work_push import file_transport

Log = list[Any]
COLLECTING = (0, 2)


@dataclass
class ToldFleet:
    """Whose members a scenario names."""

    log: Log
    now: list[Member] = field(default_factory=list)
    why_none: str | None = None
    broken: bool = False
    holds: int = 0

    @property
    def held(self) -> bool:
        return self.holds > 0

    def members(self) -> list[Member]:
        if self.broken:
            raise ServerError("the fleet's memory is gone")
        return list(self.now)

    def suspect(self, member: Member, reason: str) -> None:
        self.log.append(("suspect", member, reason))

    def give_up(self, member: Member, reason: str) -> None:
        assert self.held  # it must not go on before collectors have left it
        self.log.append(("give up", member, reason))

    def pushed(self, members: Sequence[Member], version: int) -> None:
        assert self.held
        self.log.append(("pushed", list(members), version))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        self.holds += 1
        yield
        self.holds -= 1

    def trouble(self) -> str | None:
        return self.why_none

    def close(self) -> None: ...


@dataclass
class WritingTransport:
    """Loses whom a scenario names."""

    log: Log
    fleet: ToldFleet
    losing: dict[str, str] = field(default_factory=dict)
    keeping: bool = False  # what it pushed last
    pushed: int = -1

    def push(self, version: int, sinks: Sequence[Any]) -> Push:
        assert self.fleet.held or dist.get_rank() != 0
        self.log.append(("push", version, [sink.name for sink in sinks]))
        self.pushed = version
        lost = {sink.name: self.losing[sink.name] for sink in sinks if sink.name in self.losing}
        left = dist.get_rank() == 0 and len(lost) < len(sinks)
        return Push(SyncReceipt(version, 3, 12, 0.5, "d", 2, 0.25, 0.125) if left else None, lost)

    def stored(self, version: int) -> bool:
        return self.keeping and version == self.pushed

    def close(self) -> None: ...


@dataclass
class WritingCollector:
    log: Log

    def serve_from(self, members: Sequence[Member], version: int) -> None:
        self.log.append(("serve from", list(members), version))


@dataclass
class WritingRouter:
    log: Log

    def serve(self, members: Sequence[Member]) -> None:
        self.log.append(("router serves", [m.name for m in members]))

    def member(self) -> Member:
        return Member("router", "http://r:1", "router")


class Stage:
    """One rank's part in a scenario."""

    def __init__(
        self,
        rank: int,
        start_timeout_s: float = 30.0,
        *,
        routed: bool = False,
        collector: Callable[[Log], WritingCollector] = WritingCollector,
    ) -> None:
        self.log: Log = []
        self.collector = collector(self.log) if rank in COLLECTING else None
        self.fleet = ToldFleet(self.log)
        self.transport = WritingTransport(self.log, self.fleet)
        self.servers = Servers(
            self.transport,
            dist.group.WORLD,
            sink=lambda m: ServerControl(m.url, "key", m.name, boot=m.boot, ranks=m.ranks),
            fleet=self.fleet if rank == 0 else None,
            collector=self.collector,  # type: ignore[arg-type]
            start_timeout_s=start_timeout_s,
            routed=routed,
            router=WritingRouter(self.log) if routed and rank == 0 else None,
        )

    def members(self, *names: str) -> list[Member]:
        """ "a1" is the first start of server a."""
        self.fleet.now = [Member(name[0], f"http://{name[0]}:1", name[1:]) for name in names]
        return self.fleet.now

    def happened(self) -> Log:
        """Since the last call."""
        happened, self.log[:] = list(self.log), []
        return happened


def acts(rank: int, acts: Sequence[tuple[Any, ...]], routed: bool = False) -> list[Any]:
    """(what a call returned, what happened then), for every act."""
    stage = Stage(rank, routed=routed)
    told: list[Any] = []
    for act, *rest in acts:
        if act == "members":
            stage.members(*rest)
            continue
        if act == "losing":
            stage.transport.losing = rest[0]
            continue
        if act == "keeping":
            stage.transport.keeping = True
            continue
        if act == "push":
            returned: Any = [(m.name, m.value) for m in stage.servers.push(rest[0])]
        else:
            suspects = rest[0].get(rank, {}) if rest else {}
            returned = stage.servers.refresh(suspects, newcomers=act != "refresh, trained")
        told.append((returned, stage.happened()))
    return told


def waiting(
    rank: int,
    comes_after_s: float | None,
    trouble: str | None,
    patience_s: float,
    broken: bool,
    stops_after_s: float = 3600.0,
) -> tuple[Any, float]:
    """(what ``require`` raised, seconds), for a server that comes, or does not."""
    stage = Stage(rank, patience_s)
    stage.fleet.why_none, stage.fleet.broken = trouble, broken
    if not broken:
        stage.servers.push(4)
    if comes_after_s is not None:
        threading.Timer(comes_after_s, stage.members, ["a1"]).start()
    start, error = time.monotonic(), None
    try:
        stage.servers.require(
            lambda: any_rank(time.monotonic() > start + stops_after_s, dist.group.WORLD)  # type: ignore[arg-type]
        )
    except MegarlError as e:
        error = (type(e).__name__, str(e))
    return (error or [m.name for m in stage.servers.serving]), time.monotonic() - start


@dataclass
class AskingCollector:
    """Asks the servers for their versions when it is told of them."""

    key: str
    told: list[dict[str, str]] = field(default_factory=list)

    def serve_from(self, members: Sequence[Member], version: int) -> None:
        servers = [Watched(m.url, self.key, m.name, m.boot, None) for m in members]
        self.told.append({server.boot: server.version() for server in servers})


def restarts(rank: int, file: Path, servers: Sequence[Mapping[str, Any]], version: int) -> Any:
    """Two servers; the second dies and comes back, which is the third. Real pushes."""
    first, second, again = (Member(s["name"], s["url"], s["boot"]) for s in servers)
    key = servers[0]["key"]
    transport = file_transport(rank, stages=2)
    transport.source.file = file  # type: ignore[attr-defined]
    fleet, collector = ToldFleet([]), AskingCollector(key)
    known = Servers(
        transport,
        dist.group.WORLD,
        sink=lambda m: ServerControl(m.url, key, m.name, boot=m.boot),
        fleet=fleet if rank == 0 else None,
        collector=collector if rank == 0 else None,  # type: ignore[arg-type]
        start_timeout_s=30.0,
    )
    values: dict[str, Any] = {}
    for now, step in (([first, second], True), ([first], False), ([first, again], False)):
        fleet.now = now
        if step:
            known.push(version)
        else:
            known.refresh({})
    values = {m.name: m.value.value for m in known.push(version + 1) if isinstance(m.value, Max)}
    transport.close()
    return collector.told, values


def sleeps(
    rank: int,
    files: Sequence[Path],
    servers: Sequence[Mapping[str, Any]],
    killed: int | None = None,
    **how: Any,
) -> Any:
    """Servers get version 1, give their memory back, one is ``killed``, and those that are left get
    version 2. (What each says of itself before, while asleep and afterwards; who serves in the end;
    who was given up.)
    """
    members = [Member(s["name"], s["url"], s["boot"]) for s in servers]
    key, fleet = servers[0]["key"], ToldFleet([], members)
    watched = [Watched(m.url, key, m.name, m.boot, None) for m in members]
    transport = file_transport(rank, stages=1, **how)

    def sink(member: Member) -> ServerControl:
        released = (member.name, member.boot) in known.released
        about = {"boot": member.boot, "released": released}
        return ServerControl(member.url, key, member.name, **about)

    known = Servers(
        transport,
        dist.group.WORLD,
        sink=sink,
        fleet=fleet if rank == 0 else None,
        collector=None,
        start_timeout_s=30.0,
        control_timeout_s=10.0,
    )
    told: list[Any] = []

    for version, file in enumerate(files, start=1):
        transport.source.file = file  # type: ignore[attr-defined]
        known.push(version)
        told.append([server.state() for server in watched])
        if version < len(files):
            known.release()
            told.append([server.state() for server in watched])
            if rank == 0:
                assert fleet.held  # nobody is probed
                if killed is not None:
                    os.kill(killed, signal.SIGKILL)
            dist.barrier()
    transport.close()
    assert not fleet.held and known.released == frozenset()
    given_up = [event[1].name for event in fleet.log if event[0] == "give up"]
    return told, [m.name for m in known.serving], given_up
