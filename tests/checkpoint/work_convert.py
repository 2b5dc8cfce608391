"""What workers do in ``test_convert_shared.py``. Imports nothing of Megatron."""

from pathlib import Path

import torch.distributed as dist

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
