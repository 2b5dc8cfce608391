"""What workers do in tests of the plugin's copy of weights: a server's ranks, without SGLang."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.sync.delta import Base, seal
from megarl.sync.packing import laid_flat
from tests.sglang.server import PLUGIN

sys.path.insert(0, str(PLUGIN))

from megarl_sglang_plugin import digests, envelope, exchange, node_memory, shadow

NAME = "megarl-shadow"


def sealed(
    base: Base, tensors: Mapping[str, Tensor], held: Mapping[str, str]
) -> list[tuple[str, Tensor]]:
    """A bucket of changes as trainers send it."""
    pieces = [base.encode(name, tensor, held.get(name)) for name, tensor in tensors.items()]
    flat = laid_flat([piece.payload for piece in pieces])
    together, outer = seal(flat, [piece.spec for piece in pieces])
    parts = together.split([spec.shape[0] for spec in outer])
    return [(spec.name, part) for spec, part in zip(outer, parts, strict=True)]


def bucket(base: Base, tensors: Mapping[str, Tensor], held: Mapping[str, str]) -> Any:
    """As the plugin reads it."""
    return envelope.unseal(sealed(base, tensors, held))


def received(kept: Any, given: Any, model: object = None) -> dict[str, Tensor]:
    """What a model gets, in which it does as it likes."""
    found = {}
    for name, tensor in kept.receive(given, model):
        kept.note(name, digests.tensor_digest(tensor))
        found[name] = tensor.clone()
        tensor.view(-1).view(torch.uint8).zero_()
    return found


def files() -> list[tuple[int, int]]:
    """(inode, bytes of memory) of files of the kind that this process has open, each once."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{descriptor}"
        if os.path.islink(path) and os.readlink(path).startswith(f"/memfd:{NAME}"):
            told = os.stat(path)
            found.add((told.st_ino, told.st_blocks * 512))
    return sorted(found)


def keep(
    rank: int,
    versions: Sequence[Mapping[str, Tensor]],
    hidden: Sequence[int] = (),
    misses: Mapping[int, int] = {},
    refuses: Mapping[int, int] = {},
    poor: Sequence[int] = (),
) -> dict[str, Any]:
    """Pushes of versions, two buckets each, to the copy that ranks keep. Nobody else finds the
    memory of ranks of `hidden`; those of `poor` get no memory. Of a push (`misses`) a rank does not
    get the second bucket, or (`refuses`) has forgotten what it holds. `steps`: of every push what
    is held after it, what the model was given, the error, and bytes sent.
    """
    node_memory._SPARE = 2**62 if rank in poor else 2**20
    kept, base = shadow.Shadow(deadline_s=1.5), Base()

    def told(numbers: list[int]) -> list[list[int]]:
        everyone = exchange(numbers, dist.group.WORLD, 30.0)
        if len(numbers) == 4:  # where their memory is
            for other in set(hidden) - {rank}:
                everyone[other][3] ^= 1
        return everyone

    steps = []
    for k, tensors in enumerate(versions):
        kept.agree(rank, told)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, dict(kept.digests))
        held = {n: d for n, d in everyone[0].items() if all(h.get(n) == d for h in everyone)}
        dist.barrier()
        if refuses.get(k - 1) == rank:
            time.sleep(0.3)  # what it said when it refused is not meant for this push
        kept.begin()
        names, given, error, size = list(tensors), {}, "", 0
        if refuses.get(k) == rank:
            kept.digests.clear()
        for number, part in enumerate((names[::2], names[1::2])):
            sent = bucket(base, {name: tensors[name] for name in part}, held)
            size += sum(entry.payload.numel() for entry in sent.entries)
            if number == 1 and misses.get(k) == rank:
                continue
            try:
                given |= received(kept, sent)
            except envelope.DeltaError as wrong:
                error = str(wrong)
                break
        kept.end()
        steps.append({"held": dict(kept.digests), "given": given, "error": error, "bytes": size})
        dist.barrier()
    return {"steps": steps, "files": files()}


def alone(rank: int, late_s: float, deadline_s: float) -> tuple[float, list[tuple[int, int]]]:
    """Rank 0 asks the others, which come `late_s` later: how long it took, and what it keeps."""
    kept = shadow.Shadow()
    if rank:
        time.sleep(late_s)
    start = time.monotonic()
    kept.agree(rank, lambda numbers: exchange(numbers, dist.group.WORLD, deadline_s))
    seconds = time.monotonic() - start
    time.sleep(late_s if rank == 0 else 0)  # the group lasts as long as this
    return seconds, files()
