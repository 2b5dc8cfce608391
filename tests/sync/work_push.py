"""What workers do in tests of pushes to several servers: weights of files, without an actor."""

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

from megarl.errors import MegarlError
from megarl.sync.carrier import Carrier
from megarl.sync.colocated import Colocated
from megarl.sync.delta import Base
from megarl.sync.disk import Disk
from megarl.sync.links import Links
from megarl.sync.push import PushTransport
from megarl.sync.shared_memory import SharedMemory
from megarl.sync.tensor_handles import TensorHandles
from megarl.sync.turns import Turns
from megarl.sync.version_folders import Publisher
from tests.sync.watched import Blow, Watched


class FileWeights:
    """One pipeline stage's share of a file's tensors. Collective as an actor's: every tensor waits
    for all ranks of its stage, and they are on the stage's senders by turns. ``broken``: this rank
    fails at the last tensor.
    """

    def __init__(
        self, stage: int, stages: int, group: dist.ProcessGroup, senders: int, broken: bool
    ) -> None:
        self.file = Path()
        self.stage, self.stages, self.group, self.broken = stage, stages, group, broken
        self.senders = senders

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = load_file(self.file)
        names = sorted(tensors)[self.stage :: self.stages]
        for k, name in enumerate(names):
            dist.all_reduce(torch.ones(1), group=self.group)
            if self.broken and name == names[-1]:
                raise RuntimeError(f"{name} could not be gathered")
            if dist.get_rank(self.group) == k % self.senders:
                yield name, tensors[name]


def push(
    rank: int,
    stages: int,
    servers: Sequence[dict[str, Any]],
    pushes: Sequence[tuple[int, Path, Sequence[int]]],
    blows: Mapping[str, Blow] | None = None,
    broken_rank: int | None = None,
    poor_rank: int | None = None,
    close: bool = True,
    environment: Mapping[str, str] | None = None,
    **how: Any,
) -> dict[str, Any]:
    """A push for every (version, weights, indices of ``servers``); ``blows`` by a server's boot;
    ``poor_rank`` cannot bring its weights back; ``how``: see ``file_transport``.

    ``steps``: of every push (None or error, Push, seconds); ``seen``: by boot, the operations on
    each server with its version before and after.
    """
    transport = file_transport(rank, stages, broken=rank == broken_rank, **how)
    if rank == poor_rank:
        transport.at_hand = _no_memory
    sinks = [Watched(**server, blow=(blows or {}).get(server["boot"])) for server in servers]
    steps = []
    for version, file, indices in pushes:
        transport.source.file = file  # type: ignore[attr-defined]
        start, error, done = time.monotonic(), None, None
        try:
            with mock.patch.dict(os.environ, environment or {}):
                done = transport.push(version, [sinks[k] for k in indices])
        except MegarlError as e:
            error = (type(e).__name__, str(e))
        steps.append((error, done, time.monotonic() - start))
    if close:
        transport.close()
    return {"steps": steps, "seen": {sink.boot: sink.seen for sink in sinks}}


@contextmanager
def _no_memory() -> Iterator[None]:
    raise torch.OutOfMemoryError("no room for the weights")
    yield


def file_transport(
    rank: int,
    stages: int,
    max_bytes: int = 2**26,
    deadline_s: float = 30.0,
    shared: bool = False,
    pause_mode: str = "retract",
    senders: int = 1,
    broken: bool = False,
    delta: bool = False,
    folder: Path | None = None,
    colocated: bool = False,
    handles: bool = False,
) -> PushTransport:
    """Of all ranks of the pool's present task; ``source.file`` is to be set. ``senders`` of every
    stage; ``shared``: all servers are in one group, as over NCCL. ``folder``: by disk, with what
    lies beside the weights in its ``served``; ``colocated``: by shared memory, or ``handles`` of
    it.
    """
    world = dist.get_world_size()
    each = world // stages
    groups = [dist.new_group(list(range(k * each, (k + 1) * each))) for k in range(stages)]
    stage = rank // each
    turns = None
    told = [uuid.uuid4().hex]
    dist.broadcast_object_list(told)  # a pool's workers keep their store from test to test
    if shared:
        store = dist.PrefixStore(told[0], c10d._get_default_store())
        turns = Turns(store, 4 * deadline_s)
    carrier: Carrier = Links(told[0], f"rank{rank}", "gloo", deadline_s, turns)
    if folder is not None:
        publisher = Publisher(folder, folder / "served") if rank == 0 else None
        about = {"run": told[0], "label": f"rank{rank}", "timeout_s": deadline_s}
        carrier = Disk(folder, **about, publisher=publisher)
    elif colocated or handles:
        cpu = torch.device("cpu")
        carrier = Colocated(TensorHandles(cpu) if handles else SharedMemory(), deadline_s)
    return PushTransport(
        source=FileWeights(stage, stages, groups[stage], senders, broken),
        carrier=carrier,
        rank=rank,
        stage=stage,
        senders=[[k * each + i for i in range(senders)] for k in range(stages)],
        host=dist.group.WORLD,
        max_bytes=max_bytes,
        timeout_s=deadline_s,
        pause_mode=pause_mode,
        base=Base() if delta else None,
    )
