"""The rollout servers as all trainer ranks know them: who serves, and with which weights.

Rank 0 watches over the fleet; the others learn of it here, at points that all ranks reach.

1. A server serves, and collectors hear of it, only with the weights of the version pushed last. One
   that has come, or come back (another ``boot``), gets them first, by a push of its own; or waits
   for the next one, where the trainer has these weights no more and they are not stored. Collectors
   hear of the version, too: should another process answer at a server's address before anybody here
   knows, it is found by its older one.
2. A server that a push lost, or that the fleet does not name any more, is withdrawn from the
   collectors. One lost to a push is given up: that process is never pushed to again.
3. While weights arrive nobody probes: servers pause. Nor while they have given their memory back
   (``release``), until a push after which they have all of it again.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Protocol

import torch
import torch.distributed as dist

from megarl.errors import ServerError
from megarl.hostcomm import agree, broadcast_json, gather_json
from megarl.protocols import Collector, Fleet, Transport, WeightSink
from megarl.sync.asking import ask, refusals
from megarl.types import Max, Member, Metric, Push, StepMetrics

log = logging.getLogger(__name__)

_POLL_S = 0.2
_TELL_EVERY_S = 15.0


class Router(Protocol):
    """Stands between collectors and servers (``rollout/router.py``)."""

    def serve(self, members: Sequence[Member]) -> None: ...

    def member(self) -> Member: ...


class Servers:
    """``push``, ``refresh`` and ``require`` are collective over ``group``, all trainer ranks."""

    def __init__(
        self,
        transport: Transport,
        group: dist.ProcessGroup,
        *,
        sink: Callable[[Member], WeightSink],
        fleet: Fleet | None,
        collector: Collector | None,
        start_timeout_s: float,
        control_timeout_s: float = 120.0,
        routed: bool = False,
        router: Router | None = None,
    ) -> None:
        """``fleet`` on rank 0 alone; ``collector`` on the ranks that collect. ``start_timeout_s``:
        how long ``require`` waits; ``control_timeout_s``: a server for ``release``. ``routed``:
        collectors ask the servers through a router, which is on rank 0.
        """
        self._routed, self._router = routed, router
        self._transport, self._group, self._sink = transport, group, sink
        self._fleet, self._collector = fleet, collector
        self._start_timeout_s, self._control_timeout_s = start_timeout_s, control_timeout_s
        self._version: int | None = None
        self._members: list[Member] = []  # as rank 0 last told them
        self._serving: tuple[Member, ...] = ()
        self._asked: tuple[Member, ...] = ()  # by collectors: those that serve, or the router
        self._told: tuple[tuple[Member, ...], int | None] = ((), None)  # what collectors know
        self._given_up: set[tuple[str, str]] = set()  # (name, boot)
        self._gone: dict[str, str] = {}  # why it does not serve, by name
        self.released: frozenset[tuple[str, str]] = frozenset()  # (name, boot), as all ranks know
        self._asleep = contextlib.ExitStack()  # a hold, while some are released

    @property
    def serving(self) -> tuple[Member, ...]:
        """The same on every rank."""
        return self._serving

    def push(self, version: int) -> StepMetrics:
        """New weights to all servers there are. Metrics on rank 0."""
        self._look({})
        self._version = version
        self._resume()
        members = self._usable()
        push = self._send(members)
        self.released = frozenset()
        self._serve([m for m in members if m.name not in push.lost])
        self._asleep.close()
        if dist.get_rank() != 0:
            return []
        metrics = [
            Metric("servers/serving", Max(len(self._serving))),
            Metric("servers/lost", Max(len(push.lost))),
        ]
        if (receipt := push.receipt) is not None:
            metrics += [
                Metric("sync/version", Max(receipt.version)),
                Metric("sync/seconds", Max(receipt.seconds)),
                Metric("sync/stall_seconds", Max(receipt.stall_seconds)),
                Metric("sync/verify_seconds", Max(receipt.verify_seconds)),
                Metric("sync/calls", Max(receipt.calls)),
                Metric("sync/bytes", Max(receipt.num_bytes)),
                Metric("sync/tensors", Max(receipt.tensors)),
            ]
        return metrics

    def refresh(self, suspects: Mapping[Member, str], *, newcomers: bool = True) -> bool:
        """Follows the fleet; ``suspects``: what this rank's collector says failed it. True if
        others serve now than before. As long as nothing changes, this is one small all-reduce.
        ``newcomers`` False: the trainer has other weights by now than those of the version pushed
        last; unless these are stored, who has come gets nothing before the next push.
        """
        if not self._look(suspects):
            return False
        before = self._serving
        usable = self._usable()
        if self._version is not None:
            still = [m for m in before if m in usable]
            self._serve(still)  # requests to those that are gone wait no longer than they have
            newcomers = newcomers or self._transport.stored(self._version)
            come = [m for m in usable if m not in before] if newcomers else []
            if come:
                push = self._send(come)
                known = {*still, *(m for m in come if m.name not in push.lost)}
                self._serve([m for m in usable if m in known])
        return self._serving != before

    def require(self, stopping: Callable[[], bool] = lambda: False) -> None:
        """Returns when a server serves (before the first push: when there is one), or the run is
        ``stopping`` (collective). Raises ServerError when none will come, or has come in time.
        """
        deadline = time.monotonic() + self._start_timeout_s
        tell_at = time.monotonic() + _TELL_EVERY_S
        while not (self._serving if self._version is not None else self._usable()):
            self.refresh({})
            if self._serving or stopping():
                break
            if (why := self._hopeless(deadline)) is not None:
                raise ServerError(why)
            if self._fleet is not None and time.monotonic() > tell_at:
                log.warning("no rollout server serves; waiting for one%s", self._missing())
                tell_at = time.monotonic() + _TELL_EVERY_S
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Servers give the memory of their weights and cache back until the next push. None of them
        is sampling, or asked for anything, until then. Collective.
        """
        self._asleep.enter_context(self._held())
        lost = self._ask_all(self._serving, "release")
        self._serve([m for m in self._serving if m.name not in lost])
        self.released = frozenset((m.name, m.boot) for m in self._serving)

    # ---- what rank 0 knows, on every rank ------------------------------------------------------

    def _look(self, suspects: Mapping[Member, str]) -> bool:
        """Passes suspects on to the fleet, and takes over its members; whether they changed."""
        members, error = self._members, None
        if self._fleet is not None:
            try:
                members = self._fleet.members()
            except Exception as e:
                error = e
        flags = torch.tensor([bool(suspects), members != self._members, error is not None]).int()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        suspected, changed, failed = flags.tolist()
        if failed:
            agree(error, self._group, "asking the fleet for its servers")
        if suspected:
            self._suspect(suspects)
        if changed:
            told = broadcast_json([asdict(m) for m in members], 0, self._group)
            self._members = [Member(**fields) for fields in told]
        return bool(changed)

    def _suspect(self, suspects: Mapping[Member, str]) -> None:
        everyone = gather_json([[asdict(m), why] for m, why in suspects.items()], self._group)
        if everyone is None or self._fleet is None:
            return
        reasons: dict[Member, str] = {}
        for fields, why in (pair for part in everyone for pair in part):
            reasons.setdefault(Member(**fields), why)
        for member, why in reasons.items():
            self._fleet.suspect(member, why)

    def _hopeless(self, deadline: float) -> str | None:
        """Why there is nothing to wait for, the same on every rank."""
        why = None
        if self._fleet is not None:
            why = self._fleet.trouble()
            if why is None and time.monotonic() > deadline:
                limit = f"{self._start_timeout_s:g} s (rollout.start_timeout_s)"
                why = f"no rollout server came within {limit}{self._missing()}"
        told: str | None = broadcast_json(why, 0, self._group)
        return told

    def _missing(self) -> str:
        return "".join(f"\n  {name}: {why}" for name, why in self._gone.items())

    # ---- pushes --------------------------------------------------------------------------------

    def _usable(self) -> list[Member]:
        return [m for m in self._members if (m.name, m.boot) not in self._given_up]

    def _send(self, members: Sequence[Member]) -> Push:
        assert self._version is not None
        with self._held():
            push = self._transport.push(self._version, [self._sink(m) for m in members])
            for member in members:
                if (why := push.lost.get(member.name)) is not None:
                    self._lose(member, why)
            if self._fleet is not None:
                kept = [m for m in members if m.name not in push.lost]
                self._fleet.pushed(kept, self._version)
        return push

    def _resume(self) -> None:
        """Memory for the weights that are about to come, to those that have released it."""
        sleeping = [m for m in self._usable() if (m.name, m.boot) in self.released]
        self._ask_all(sleeping, "resume_memory")

    def _ask_all(self, members: Sequence[Member], op: str) -> set[str]:
        """The names of those that failed at it; they are given up."""
        if not members:
            return set()
        lost: dict[str, str] = {}
        if dist.get_rank() == 0:
            sinks = [self._sink(member) for member in members]
            replies = [ask(sink, op, {}, self._control_timeout_s) for sink in sinks]
            wait(replies)
            lost = refusals(sinks, replies)
        lost = broadcast_json(lost, 0, self._group)
        for member in members:
            if (why := lost.get(member.name)) is not None:
                log.warning("%s: %s", member.name, why)
                self._lose(member, why)
        return set(lost)

    def _lose(self, member: Member, why: str) -> None:
        """Inside the hold of the push: paused, with half of the weights, it is never told to go on
        while collectors may still take an answer from it.
        """
        self._given_up.add((member.name, member.boot))
        self._gone[member.name] = why
        if self._fleet is not None:
            self._fleet.give_up(member, why)

    def _held(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._fleet is None else self._fleet.hold()

    def _serve(self, members: Sequence[Member]) -> None:
        """Collectors hear of it if they are others than before, or have newer weights."""
        assert self._version is not None
        if tuple(members) != self._serving:
            for member in self._serving:
                if member not in members:
                    self._gone.setdefault(member.name, "it does not answer any more")
            self._serving = tuple(members)
            for member in members:
                self._gone.pop(member.name, None)
            self._asked = self._through_router() if self._routed else self._serving
        if self._told == (self._asked, self._version):
            return
        self._told = self._asked, self._version
        if self._collector is not None:
            self._collector.serve_from(self._asked, self._version)

    def _through_router(self) -> tuple[Member, ...]:
        """Whom collectors ask instead of those that serve, of which the router hears first."""
        told, error = None, None
        if self._router is not None:
            try:
                self._router.serve(self._serving)
                told = asdict(self._router.member())
            except Exception as e:
                error = e
        agree(error, self._group, "telling the router who serves")
        front = broadcast_json(told, 0, self._group)
        return (Member(**front),) if self._serving else ()
