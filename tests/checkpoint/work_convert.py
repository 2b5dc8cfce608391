"""What workers do in ``test_convert_shared.py``. Imports nothing of Megatron."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.manager import MEGATRON, MODEL
from megarl.checkpoint.models import stored_spec
from megarl.checkpoint.verify import stored_digests, verify_export, verify_import
from megarl.checkpoint.workers import Workers
from megarl.convert import Export, Import
from megarl.errors import MegarlError


def convert(
    rank: int, ways: list[tuple[str, Path, Path]], threads: int, fails: int | None = None
) -> list[str | None]:
    """("import" or "export", source, out), one after another; what each was refused with.
    ``fails``: the process whose disk is full after a while.
    """
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if rank == fails:
            raise OSError(28, "No space left on device")

    group = dist.group.WORLD
    workers = Workers(rank, dist.get_world_size(), group, threads, advance)
    said: list[str | None] = []
    for way, source, out in ways:
        try:
            conversion = {"import": Import, "export": Export}[way](source)
            conversion.run(out, workers)
            said.append(None)
        except (MegarlError, OSError) as e:
            said.append(f"{type(e).__name__}: {e}")
    assert done or fails is not None
    return said


def verify(rank: int, checkpoint: Path, folder: Path, threads: int) -> list[str]:
    """What a look at an import and at an export of it says, of all processes together."""
    workers = Workers(rank, dist.get_world_size(), dist.group.WORLD, threads)
    spec, digests = stored_spec(checkpoint / MODEL), stored_digests(checkpoint)
    said = []
    looks: list[Callable[[], str]] = [
        lambda: verify_import(checkpoint, spec, digests, workers),
        lambda: verify_export(checkpoint / MEGATRON, folder, spec, workers),
    ]
    for look in looks:
        try:
            said.append(look())
        except MegarlError as e:
            said.append(f"{type(e).__name__}: {e}")
    return said
