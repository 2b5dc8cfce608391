"""Weights to rollout servers: ``protocols.Transport``.

One push, in order; every step is reached by every trainer rank, and after each all ranks know which
servers are still part of it:

1. ``begin`` on every server: sampling stops, nothing is sampled until ``commit``.
2. Every sender's carrier opens its way to the servers (over process groups: links.py).
3. All senders of all stages, together: the stage gathers its tensors, they take the form in which
   servers hold them and are packed into flat buckets (packing.py). A thread sends each to all
   servers while the next is gathered and packed.
   Of what all servers hold alike, by the digests they gave before, only what changed is sent
   (delta.py), if so set. Where it went to a folder (disk.py), that is published now, and servers
   load it.
4. Both ends digest what they have: the trainer what it sent, every server what it now serves. All
   must agree.
5. A process that does not read its weights back (SGLang) proves once that what it receives is what
   it computes with: it digests its weights, spoils them, gets everything again and compares.
6. ``commit``: the version moves, once, and sampling goes on with an empty cache.

A server that fails at any point, or does not answer by the deadline, is left out and told of; the
others are not disturbed. Where it shared a way with others, these get everything anew by another,
in at most ``ATTEMPTS`` attempts. One that is left out after ``begin`` samples nothing, or is whole.
A failure of the trainer's own part raises SyncError on every rank.

Of a carrier that keeps what was sent, a version goes out once: later pushes of it hand it over
again, and need nothing of the trainer, which may have other weights by then (``stored``).
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import SyncError
from megarl.hostcomm import broadcast_json, gather_and_share, gather_json
from megarl.protocols import Bucket, WeightSink, WeightSource
from megarl.sync.asking import ask, failed
from megarl.sync.carrier import Carrier, Identity, Outcome, identities
from megarl.sync.delta import Base, changes, held_by_all
from megarl.sync.packing import Packer
from megarl.sync.sending import Encode, Sent, send_all
from megarl.sync.stream import pieces, push_digest
from megarl.types import Push, SyncReceipt

log = logging.getLogger(__name__)

ATTEMPTS = 3


def singly(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
    """As they are; none has to come together with another."""
    return ([item] for item in tensors)


@dataclass
class PushTransport:
    """``senders``: of each pipeline stage; ``stage``: this rank's. ``form``: of the source's
    tensors, as servers hold them, in groups that must arrive together. ``at_hand``: inside, the
    source's tensors can be read; a push may come at any time. ``base``: what this rank last sent;
    None: everything is sent whole. ``device``: where buckets are sent from.
    """

    source: WeightSource
    carrier: Carrier
    rank: int
    stage: int
    senders: Sequence[Sequence[int]]
    host: dist.ProcessGroup  # of all trainer ranks
    max_bytes: int
    timeout_s: float
    pause_mode: str = "retract"
    form: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[Bucket]] = singly
    at_hand: Callable[[], AbstractContextManager[None]] = nullcontext
    base: Base | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _proven: set[Identity] = field(default_factory=set)
    _attempts: int = 0
    _kept: tuple[int, Sent] | None = None  # version, and on rank 0 what was sent of it
    _packer: Packer = field(init=False)

    def __post_init__(self) -> None:
        sealed, allocate = self.base is not None, self.carrier.buffer
        self._packer = Packer(self.max_bytes, self.device, sealed, allocate)

    @property
    def sending(self) -> bool:
        return self.rank in self.senders[self.stage]

    def stored(self, version: int) -> bool:
        """Whether a push of this version reads no weights: they were sent, and are kept. The same
        on all ranks.
        """
        return self._kept is not None and self._kept[0] == version

    def push(self, version: int, sinks: Sequence[WeightSink]) -> Push:
        names = [sink.name for sink in sinks]
        if len(set(names)) != len(names):
            raise SyncError(f"weight sync: two servers of one name among {', '.join(names)}")
        start = time.monotonic()
        outcome, left = Outcome(), list(sinks)
        receipt: SyncReceipt | None = None
        stalled = 0.0
        for _ in range(ATTEMPTS):
            if not left:
                break
            outcome.again.clear()
            held = self._held(left, outcome)
            stalled = stalled or time.monotonic()
            done = self._attempt(version, left, outcome, held, (start, stalled))
            receipt = _together(receipt, done)
            left = [sink for sink in left if sink.name in outcome.again]
        broken = f"its weight groups broke {ATTEMPTS} times, each time by another server"
        lost = outcome.lost | {sink.name: broken for sink in left}
        for name, reason in lost.items():
            log.warning("weight sync: version %d did not reach %s: %s", version, name, reason)
        return Push(receipt, lost)

    def close(self) -> None:
        """Lets the servers go. Not collective."""
        self.carrier.close()

    # ---- the steps -----------------------------------------------------------------------------

    def _attempt(
        self,
        version: int,
        sinks: Sequence[WeightSink],
        outcome: Outcome,
        held: Mapping[str, str],
        since: tuple[float, float],
    ) -> SyncReceipt | None:
        """One pass over all steps; ``outcome`` is the same on all ranks after each. ``since``: when
        the push began, and when servers were first paused for it.
        """
        how = {"mode": self.pause_mode, "session": self.carrier.session}
        self._control(sinks, outcome, "begin", how)
        sent, confirm_s = self._deliver(version, sinks, outcome, held)
        deliveries = [(sent, confirm_s)]
        unproven = [s for s in _serving(sinks, outcome) if self._has_to_prove(s)]
        if unproven:
            self._control(unproven, outcome, "snapshot", {})
            deliveries.append(self._deliver(version, unproven, outcome, {}))
            self._control(unproven, outcome, "compare", {})
            self._proven.update(identities(_serving(unproven, outcome)))
        self._control(sinks, outcome, "commit", {"version": version, **how})
        if self.rank != 0 or sent is None or not _serving(sinks, outcome):
            return None
        now, (start, stalled) = time.monotonic(), since
        done = [(each, seconds) for each, seconds in deliveries if each is not None]
        return SyncReceipt(
            version=version,
            tensors=len(sent.digests),
            num_bytes=sent.num_bytes,
            seconds=now - start,
            digest=push_digest(sent.digests),
            calls=sum(each.calls for each, _ in done),
            stall_seconds=now - stalled,
            verify_seconds=sum(each.digest_seconds + seconds for each, seconds in done),
        )

    def _has_to_prove(self, sink: WeightSink) -> bool:
        return sink.proves and (sink.name, sink.boot) not in self._proven

    def _deliver(
        self,
        version: int,
        sinks: Sequence[WeightSink],
        outcome: Outcome,
        held: Mapping[str, str],
    ) -> tuple[Sent | None, float]:
        """Everything to those that still serve, and their word that they have it. (What was sent by
        all, on rank 0; seconds it took to compare.)
        """
        if self._kept is not None and self.stored(version):
            sent = replace(self._kept[1], calls=0, digest_seconds=0.0)
        else:
            self._open(sinks, outcome)
            mine = self._send(sinks, outcome, held)
            if not _serving(sinks, outcome):
                return None, 0.0
            sent = self._merge(mine)
        self._finish(version, sent, sinks, outcome)
        if self.carrier.keeps:
            self._kept = version, sent
        start = time.monotonic()
        self._confirm(sinks, outcome, sent)
        return sent, time.monotonic() - start

    def _control(
        self, sinks: Sequence[WeightSink], outcome: Outcome, op: str, payload: Mapping[str, Any]
    ) -> None:
        found = Outcome()
        if self.rank == 0:
            serving = _serving(sinks, outcome)
            replies = [ask(sink, op, payload, self.timeout_s) for sink in serving]
            wait(replies)
            for sink, reply in zip(serving, replies, strict=True):
                if failed(reply):
                    found.lost[sink.name] = str(reply.exception())
        self._share(outcome, found, None, f"weight sync: {op}")

    def _open(self, sinks: Sequence[WeightSink], outcome: Outcome) -> None:
        self._attempts += 1
        found, error = Outcome(), None
        serving = _serving(sinks, outcome)
        if self.sending and serving:
            try:
                found = self.carrier.open(serving, self._attempts)
            except Exception as e:
                error = e
        self._share(outcome, found, error, "joining the weight groups")

    def _send(self, sinks: Sequence[WeightSink], outcome: Outcome, held: Mapping[str, str]) -> Sent:
        names = {sink.name for sink in _serving(sinks, outcome)}
        if not names:
            return Sent()
        with ExitStack() as at_hand:
            error = None
            try:
                at_hand.enter_context(self.at_hand())
            except Exception as e:  # the others must not wait for this rank in a gather
                error = e
            self._share(outcome, Outcome(), error, "bringing the weights back")
            how = (self.form, self._encoding(held), self._packer, self.carrier)
            sent = send_all(self.source.tensors(), *how, names)
        if self.device.type != "cpu":
            self._packer.free()  # training needs the memory
        self._share(outcome, sent.outcome, sent.error, "sending the weights")
        return sent

    def _held(self, sinks: Sequence[WeightSink], outcome: Outcome) -> Mapping[str, str]:
        """Digests of what all hold alike. One that does not say takes no changes, or is gone."""
        if self.base is None:
            return {}
        found, told = Outcome(), []
        if self.rank == 0:
            replies = [ask(sink, "held", {}, self.timeout_s) for sink in sinks]
            wait(replies)
            for sink, reply in zip(sinks, replies, strict=True):
                if failed(reply):
                    found.lost[sink.name] = f"{reply.exception()} (needed by sync.delta)"
                else:
                    told.append(reply.result()["digests"])
        self._share(outcome, found, None, "asking what servers hold")
        held: dict[str, str] = broadcast_json(held_by_all(told), 0, self.host)
        return held

    def _encoding(self, held: Mapping[str, str]) -> Encode:
        return pieces if self.base is None else partial(changes, base=self.base, held=held)

    def _merge(self, mine: Sent) -> Sent:
        """What all senders have sent, on rank 0."""
        everyone = gather_json(
            [mine.digests, mine.num_bytes, mine.calls, mine.digest_seconds], self.host
        )
        total = Sent()
        for digests, num_bytes, calls, seconds in everyone or ():
            total.digests |= digests
            total.num_bytes += num_bytes
            total.calls += calls
            total.digest_seconds = max(total.digest_seconds, seconds)
        return total

    def _finish(
        self, version: int, sent: Sent, sinks: Sequence[WeightSink], outcome: Outcome
    ) -> None:
        found, error = Outcome(), None
        if self.rank == 0:
            try:
                found = self.carrier.finish(version, sent.digests, _serving(sinks, outcome))
            except Exception as e:
                error = e
        self._share(outcome, found, error, "handing the weights over")

    def _confirm(self, sinks: Sequence[WeightSink], outcome: Outcome, sent: Sent) -> None:
        found = Outcome()
        if self.rank == 0:
            serving = _serving(sinks, outcome)
            replies = [ask(sink, "digest", {}, self.timeout_s) for sink in serving]
            wait(replies)
            for sink, reply in zip(serving, replies, strict=True):
                held = None if failed(reply) else reply.result()["digests"]
                wrong = str(reply.exception()) if held is None else _difference(sent.digests, held)
                if wrong:
                    found.lost[sink.name] = wrong
        self._share(outcome, found, None, "comparing weight digests")

    def _share(self, outcome: Outcome, found: Outcome, error: Exception | None, what: str) -> None:
        """Makes what one rank found known to all; raises SyncError on all if a rank's own part
        failed.
        """
        text = None if error is None else f"{type(error).__name__}: {error}"
        everyone = gather_and_share([found.lost, sorted(found.again), text], self.host)
        for rank, (lost, again, wrong) in enumerate(everyone):
            if wrong is not None:
                raise SyncError(f"{what} failed on rank {rank}: {wrong}") from error
            outcome.add(lost, again)
        self.carrier.drop(outcome.lost)


def _together(first: SyncReceipt | None, second: SyncReceipt | None) -> SyncReceipt | None:
    """Of two attempts: what was sent is the same, and times are counted from the first."""
    if first is None or second is None:
        return first or second
    verify_seconds = first.verify_seconds + second.verify_seconds
    return replace(second, calls=first.calls + second.calls, verify_seconds=verify_seconds)


def _serving(sinks: Sequence[WeightSink], outcome: Outcome) -> list[WeightSink]:
    return [sink for sink in sinks if sink.name not in outcome.out()]


def _difference(sent: Mapping[str, str], held: Mapping[str, str]) -> str:
    """How what a server serves differs from the push; empty if it does not."""
    missing, extra = sorted(sent.keys() - held.keys()), sorted(held.keys() - sent.keys())
    wrong = sorted(name for name in sent.keys() & held.keys() if sent[name] != held[name])
    if not (missing or extra or wrong):
        return ""
    return (
        f"it does not hold the weights that were sent: {len(wrong)} differ {wrong[:3]}, "
        f"{len(missing)} missing {missing[:3]}, {len(extra)} more than sent {extra[:3]}"
    )
