"""Weights to rollout servers over process groups: ``protocols.Transport``.

One push, in order; every step is reached by every trainer rank, and after each all ranks know which
servers are still part of it:

1. ``begin`` on every server: sampling stops, nothing is sampled until ``commit``.
2. Stage by stage, the stage's sender and the servers join groups (links.py), unless they are in
   them already.
3. Stage by stage: all ranks of the stage gather its tensors, the sender puts them into size-capped
   buckets, announces each over HTTP (``receive``) and broadcasts its bytes (sender rank 0, then the
   servers' ranks).
4. Both ends digest what they have: the trainer what it sent, every server what it now serves. All
   must agree.
5. ``commit``: the version moves, once, and sampling goes on with an empty cache.

A server that fails at any point, or does not answer by the deadline, is left out and told of; the
others are not disturbed. Where it shared a group with others, these get everything anew in another
group, in at most ``ATTEMPTS`` attempts. One that is left out after ``begin`` samples nothing, or is
whole. A failure of the trainer's own part raises SyncError on every rank.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megarl.errors import SyncError
from megarl.hostcomm import gather_and_share, gather_json
from megarl.ops import digest
from megarl.protocols import WeightSink, WeightSource
from megarl.sync.links import SHARED, Links, Outcome, ask, failed
from megarl.sync.stream import bucketize, flatten, push_digest, specs_of
from megarl.types import Push, SyncReceipt

log = logging.getLogger(__name__)

ATTEMPTS = 3


@dataclass
class BroadcastTransport:
    """``senders``: the sending rank of each pipeline stage; ``stage``: this rank's. ``shared``:
    whether the servers of a push share a group a stage (links.py); None: by backend. ``at_hand``:
    inside, the source's tensors can be read; a push may come at any time.
    """

    source: WeightSource
    rank: int
    stage: int
    senders: Sequence[int]
    host: dist.ProcessGroup  # of all trainer ranks
    backend: str
    max_bytes: int
    timeout_s: float
    pause_mode: str = "retract"
    shared: bool | None = None
    at_hand: Callable[[], AbstractContextManager[None]] = nullcontext
    _links: Links = field(init=False)

    def __post_init__(self) -> None:
        shared = SHARED[self.backend] if self.shared is None else self.shared
        self._links = Links(self.stage, self.backend, self.timeout_s, shared=shared)

    @property
    def sending(self) -> bool:
        return self.rank == self.senders[self.stage]

    def push(self, version: int, sinks: Sequence[WeightSink]) -> Push:
        names = [sink.name for sink in sinks]
        if len(set(names)) != len(names):
            raise SyncError(f"weight sync: two servers of one name among {', '.join(names)}")
        start = time.monotonic()
        outcome, left = Outcome(), list(sinks)
        receipt: SyncReceipt | None = None
        for _ in range(ATTEMPTS):
            if not left:
                break
            outcome.again.clear()
            done = self._attempt(version, left, outcome, start)
            receipt = receipt or done
            left = [sink for sink in left if sink.name in outcome.again]
        broken = f"its weight groups broke {ATTEMPTS} times, each time by another server"
        lost = outcome.lost | {sink.name: broken for sink in left}
        for name, reason in lost.items():
            log.warning("weight sync: version %d did not reach %s: %s", version, name, reason)
        return Push(receipt, lost)

    def close(self) -> None:
        """Leaves the groups, and lets the servers leave. Not collective."""
        self._links.close()

    # ---- the steps -----------------------------------------------------------------------------

    def _attempt(
        self, version: int, sinks: Sequence[WeightSink], outcome: Outcome, start: float
    ) -> SyncReceipt | None:
        """One pass over all steps; ``outcome`` is the same on every rank after each."""
        self._control(sinks, outcome, "begin", {"mode": self.pause_mode})
        for stage in range(len(self.senders)):
            self._join(stage, sinks, outcome)
        sent: dict[str, str] = {}
        num_bytes = 0
        for stage in range(len(self.senders)):
            part = self._send_stage(stage, sinks, outcome)
            sent, num_bytes = sent | part[0], num_bytes + part[1]
        if not _serving(sinks, outcome):
            return None
        merged, total = self._merge(sent, num_bytes)
        self._confirm(sinks, outcome, merged)
        self._control(sinks, outcome, "commit", {"version": version, "mode": self.pause_mode})
        if self.rank != 0 or not _serving(sinks, outcome):
            return None
        return SyncReceipt(
            version=version,
            tensors=len(merged),
            num_bytes=total,
            seconds=time.monotonic() - start,
            digest=push_digest(merged),
        )

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

    def _join(self, stage: int, sinks: Sequence[WeightSink], outcome: Outcome) -> None:
        found, error = Outcome(), None
        serving = _serving(sinks, outcome)
        if stage == self.stage and self.sending and serving:
            try:
                found = self._links.open(serving)
            except Exception as e:
                error = e
        self._share(outcome, found, error, "joining the weight groups")

    def _send_stage(
        self, stage: int, sinks: Sequence[WeightSink], outcome: Outcome
    ) -> tuple[dict[str, str], int]:
        """(digest by name, bytes) of what this rank has sent. After a failure the stage's gathers
        still run to their end, so that no rank of the stage is left waiting in one.
        """
        names = {sink.name for sink in _serving(sinks, outcome)}
        if not names:
            return {}, 0
        digests: dict[str, str] = {}
        size, error, found = 0, None, Outcome()
        if stage == self.stage:
            with self.at_hand():
                digests, size, error = self._stream(names, found)
        self._share(outcome, found, error, f"sending the weights of pipeline stage {stage}")
        return digests, size

    def _stream(
        self, names: set[str], found: Outcome
    ) -> tuple[dict[str, str], int, Exception | None]:
        """(digest by name, bytes, what failed) of this rank's stage, to ``names``."""
        digests: dict[str, str] = {}
        size, error = 0, None
        stream = self.source.tensors()
        try:
            for bucket in bucketize(stream, self.max_bytes):
                if not names - found.out():
                    continue
                flat = flatten(bucket)
                digests |= {name: digest(tensor) for name, tensor in bucket}
                size += flat.numel()
                now = self._links.send(flat, specs_of(bucket), names - found.out())
                found.add(now.lost, now.again)
        except Exception as e:
            error = e
            for _ in stream:
                pass
        return digests, size, error

    def _merge(self, sent: Mapping[str, str], num_bytes: int) -> tuple[dict[str, str], int]:
        """What all senders have sent, on rank 0."""
        parts = gather_json([sent, num_bytes], self.host) or []
        merged = {name: d for names, _ in parts for name, d in names.items()}
        return merged, sum(size for _, size in parts)

    def _confirm(
        self, sinks: Sequence[WeightSink], outcome: Outcome, sent: Mapping[str, str]
    ) -> None:
        found = Outcome()
        if self.rank == 0:
            serving = _serving(sinks, outcome)
            replies = [ask(sink, "digest", {}, self.timeout_s) for sink in serving]
            wait(replies)
            for sink, reply in zip(serving, replies, strict=True):
                held = None if failed(reply) else reply.result()["digests"]
                wrong = str(reply.exception()) if held is None else _difference(sent, held)
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
        self._links.drop(outcome.lost)


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
