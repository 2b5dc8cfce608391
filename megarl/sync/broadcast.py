"""Weights to rollout servers over process groups: ``protocols.Transport``.

One push, in order; every step is reached by every trainer rank:

1. ``begin`` on every server: sampling stops, nothing is sampled until ``commit``.
2. Stage by stage: all ranks of the stage gather its tensors, the stage's sender puts them into
   size-capped buckets, announces each over HTTP (``receive``) and broadcasts its bytes in the group
   of that stage (sender rank 0, then the servers' ranks).
3. Both ends digest what they have: the trainer what it sent, every server what it now serves. All
   must agree.
4. ``commit``: the version moves, once, and sampling goes on with an empty cache.

A failure at any point raises on every rank, and the server samples nothing until a whole push
succeeds.
"""

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import SyncError
from megarl.hostcomm import agree, gather_json
from megarl.ops import digest
from megarl.protocols import WeightSink, WeightSource
from megarl.sync.group import create_store, join_group, leave_group
from megarl.sync.stream import bucketize, flatten, push_digest, specs_of
from megarl.types import SyncReceipt

log = logging.getLogger(__name__)

_LEAVE_S = 5.0


@dataclass
class BroadcastTransport:
    """``senders``: the sending rank of each pipeline stage; ``stage``: this rank's. Sinks on
    senders only.
    """

    rank: int
    stage: int
    senders: Sequence[int]
    host: dist.ProcessGroup
    address: str  # of this machine, as the servers reach it
    backend: str
    max_bytes: int
    timeout_s: float
    _source: WeightSource | None = None
    _sinks: list[WeightSink] = field(default_factory=list)
    _group: dist.ProcessGroup | None = None
    _broken: bool = False
    # of its own for every run: a server may still be in the group of one that was killed
    _name: str = field(default_factory=lambda: f"megarl-{uuid.uuid4().hex[:8]}")
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))

    @property
    def sending(self) -> bool:
        return self.rank == self.senders[self.stage]

    @property
    def group_name(self) -> str:
        return f"{self._name}-stage{self.stage}"

    def connect(self, source: WeightSource, sinks: Sequence[WeightSink]) -> None:
        """Join one group per stage with every server. Collective; raises SyncError if any member
        stays away.
        """
        self._source, self._sinks = source, list(sinks)
        for stage in range(len(self.senders)):
            error = None
            if stage == self.stage and self.sending:
                try:
                    self._join()
                except Exception as e:  # reported on every rank by agree()
                    error = e
            agree(error, self.host, "joining the weight group")

    def push(self, version: int) -> SyncReceipt | None:
        """Send everything and see it confirmed. Collective. The receipt on rank 0."""
        start = time.monotonic()
        self._on_rank_zero("begin", {})
        sent: dict[str, str] = {}
        num_bytes, error = 0, None
        for stage in range(len(self.senders)):
            if stage == self.stage:
                sent, num_bytes, error = self._send_stage()
            agree(error, self.host, f"sending the weights of pipeline stage {stage}")
        parts = gather_json([sent, num_bytes], self.host)
        merged = {name: d for names, _ in parts or [] for name, d in names.items()}
        self._confirm(merged)
        self._on_rank_zero("commit", {"version": version})
        if self.rank != 0 or parts is None:
            return None
        return SyncReceipt(
            version=version,
            tensors=len(merged),
            num_bytes=sum(size for _, size in parts),
            seconds=time.monotonic() - start,
            digest=push_digest(merged),
        )

    def close(self) -> None:
        """Leave the groups, and let the servers leave. Servers that are gone are not an error.

        After a broken push the group is left as it is: a bucket may be pending in it that nobody
        will receive, and destroying the group would wait for that.
        """
        if self._group is None or self._broken:
            return
        name = {"group_name": self.group_name}
        leaving = [
            self._threads.submit(sink.control, "leave_group", name, _LEAVE_S)
            for sink in self._sinks
        ]
        leave_group(self._group)
        self._group = None
        for future in leaving:
            if (error := future.exception()) is not None:
                log.warning("leaving weight group %s: %s", self.group_name, error)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _join(self) -> None:
        self._store, port = create_store(self.address, timeout_s=self.timeout_s)
        sizes = [sink.ranks for sink in self._sinks]
        world = 1 + sum(sizes)
        joins: list[Future[Any]] = [
            self._threads.submit(
                sink.control,
                "join_group",
                {
                    "master_address": self.address,
                    "master_port": port,
                    "rank_offset": 1 + sum(sizes[:k]),
                    "world_size": world,
                    "group_name": self.group_name,
                    "backend": self.backend,
                },
                self.timeout_s,
            )
            for k, sink in enumerate(self._sinks)
        ]
        mine: Future[Any] = self._threads.submit(
            join_group,
            self._store,
            rank=0,
            world_size=world,
            group_name=self.group_name,
            backend=self.backend,
            timeout_s=self.timeout_s,
        )
        # a server that refuses says so at once; our own joining would only time out
        done, _ = wait([*joins, mine], return_when=FIRST_EXCEPTION)
        for future in (*(j for j in joins if j in done), mine):
            future.result()
        self._group = mine.result()

    def _send_stage(self) -> tuple[dict[str, str], int, Exception | None]:
        """(digest by name, bytes, error). After an error the stage's gathers still run to their
        end, so that no rank of the stage is left waiting in one."""
        assert self._source is not None, "connect() comes first"
        digests: dict[str, str] = {}
        size, error = 0, None
        stream = self._source.tensors()
        try:
            for bucket in bucketize(stream, self.max_bytes):
                if self._group is None:
                    raise SyncError(f"rank {self.rank} has tensors to send and is not connected")
                flat = flatten(bucket)
                digests |= {name: digest(tensor) for name, tensor in bucket}
                size += flat.numel()
                self._send(flat, specs_of(bucket))
        except Exception as e:
            error, self._broken = e, True
            for _ in stream:
                pass
        return digests, size, error

    def _send(self, flat: torch.Tensor, specs: Sequence[Any]) -> None:
        assert self._group is not None
        message = {
            "names": [s.name for s in specs],
            "dtypes": [s.dtype for s in specs],
            "shapes": [list(s.shape) for s in specs],
            "group_name": self.group_name,
        }
        replies = [
            self._threads.submit(sink.control, "receive", message, self.timeout_s)
            for sink in self._sinks
        ]
        on = flat.cpu() if self.backend == "gloo" else flat
        work = dist.broadcast(on, group_src=0, group=self._group, async_op=True)
        for reply in replies:  # a refusal comes back at once; the broadcast would only time out
            reply.result()
        work.wait()

    def _confirm(self, sent: Mapping[str, str]) -> None:
        error: Exception | None = None
        if self.rank == 0:
            try:
                for sink in self._sinks:
                    held = sink.control("digest", {}, self.timeout_s)["digests"]
                    _compare(sink.name, sent, held)
            except Exception as e:
                error = e
        agree(error, self.host, "comparing weight digests")

    def _on_rank_zero(self, op: str, payload: Mapping[str, Any]) -> None:
        error: Exception | None = None
        if self.rank == 0:
            try:
                replies = [
                    self._threads.submit(sink.control, op, payload, self.timeout_s)
                    for sink in self._sinks
                ]
                for reply in replies:
                    reply.result()
            except Exception as e:
                error = e
        agree(error, self.host, f"weight sync: {op}")


def _compare(server: str, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Raise SyncError naming what differs between the push and what ``server`` serves."""
    missing, extra = sorted(sent.keys() - held.keys()), sorted(held.keys() - sent.keys())
    wrong = sorted(name for name in sent.keys() & held.keys() if sent[name] != held[name])
    if missing or extra or wrong:
        raise SyncError(
            f"{server} does not hold the weights that were sent: {len(wrong)} differ {wrong[:3]}, "
            f"{len(missing)} missing {missing[:3]}, {len(extra)} more than sent {extra[:3]}"
        )
