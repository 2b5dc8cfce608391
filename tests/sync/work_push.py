"""What workers do in tests of pushes to several servers: weights of files, without an actor."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.errors import MegarlError
from megarl.sync.broadcast import BroadcastTransport
from tests.sync.watched import Blow, Watched


class FileWeights:
    """One pipeline stage's share of a file's tensors. Collective as an actor's: every tensor waits
    for all ranks of its stage. ``broken``: this rank fails at the last tensor.
    """

    def __init__(self, stage: int, stages: int, group: dist.ProcessGroup, broken: bool) -> None:
        self.file = Path()
        self.stage, self.stages, self.group, self.broken = stage, stages, group, broken

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = load_file(self.file)
        names = sorted(tensors)[self.stage :: self.stages]
        for name in names:
            dist.all_reduce(torch.ones(1), group=self.group)
            if self.broken and name == names[-1]:
                raise RuntimeError(f"{name} could not be gathered")
            if dist.get_rank(self.group) == 0:
                yield name, tensors[name]


def push(
    rank: int,
    stages: int,
    servers: Sequence[dict[str, Any]],
    pushes: Sequence[tuple[int, Path, Sequence[int]]],
    max_bytes: int = 2**40,
    deadline_s: float = 30.0,
    blows: Mapping[str, Blow] | None = None,
    shared: bool | None = None,
    pause_mode: str = "retract",
    broken_rank: int | None = None,
    close: bool = True,
) -> dict[str, Any]:
    """A push for every (version, weights, indices of ``servers``); ``blows`` by a server's boot.

    ``steps``: of every push (None or error, Push, seconds); ``seen``: by boot, the operations on
    each server with its version before and after.
    """
    transport = file_transport(
        rank, stages, max_bytes, deadline_s, shared, pause_mode, rank == broken_rank
    )
    sinks = [Watched(**server, blow=(blows or {}).get(server["boot"])) for server in servers]
    steps = []
    for version, file, indices in pushes:
        transport.source.file = file  # type: ignore[attr-defined]
        start, error, done = time.monotonic(), None, None
        try:
            done = transport.push(version, [sinks[k] for k in indices])
        except MegarlError as e:
            error = (type(e).__name__, str(e))
        steps.append((error, done, time.monotonic() - start))
    if close:
        transport.close()
    return {"steps": steps, "seen": {sink.boot: sink.seen for sink in sinks}}


def file_transport(
    rank: int,
    stages: int,
    max_bytes: int = 2**40,
    deadline_s: float = 30.0,
    shared: bool | None = None,
    pause_mode: str = "retract",
    broken: bool = False,
) -> BroadcastTransport:
    """Of all ranks of the pool's present task; ``source.file`` is to be set."""
    world = dist.get_world_size()
    each = world // stages
    groups = [dist.new_group(list(range(k * each, (k + 1) * each))) for k in range(stages)]
    stage = rank // each
    return BroadcastTransport(
        source=FileWeights(stage, stages, groups[stage], broken),
        rank=rank,
        stage=stage,
        senders=[k * each for k in range(stages)],
        host=dist.group.WORLD,
        backend="gloo",
        max_bytes=max_bytes,
        timeout_s=deadline_s,
        shared=shared,
        pause_mode=pause_mode,
    )
