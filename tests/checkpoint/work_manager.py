"""What workers do in tests of checkpoints: every function saves on all ranks."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.checkpoint.manager import MEGATRON, CheckpointManager


def save_all(
    rank: int,
    folder: Path,
    hf: Path,
    steps: list[int],
    failing: dict[int, list[int]] | None = None,
    loop_state: Any = None,
) -> list[Any]:
    """Save every step; at step s the writers of the ranks ``failing[s]`` fail. What each save gave.
    A rank that fails at a step where another does not leaves its group, as its process would.
    """
    manager = CheckpointManager(folder, keep=2, rank=rank, host=dist.group.WORLD)
    outcomes: list[Any] = []
    for step in steps:
        ranks = (failing or {}).get(step, [])

        def write(path: Path, step: int = step, ranks: list[int] = ranks) -> None:
            (path / f"rank_{rank}.json").write_text(json.dumps(step))
            if rank in ranks:
                raise OSError(28, "No space left on device")

        try:
            outcomes.append(manager.save(step, loop_state or {}, {}, hf, {MEGATRON: write}, 0).name)
        except Exception as error:
            outcomes.append((type(error).__name__, str(error)))
            if len(ranks) == 1:
                break
    return outcomes


def save_what_is_no_json(rank: int, folder: Path, hf: Path) -> Any:
    return save_all(rank, folder, hf, [1, 2], loop_state={"source": {1, 2} if rank == 0 else {}})


def killed_while_writing(folder: Path, hf: Path) -> None:
    """A process of its own: saves step 1, and dies inside the writer of step 2."""
    import os
    import signal

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    manager = CheckpointManager(folder, keep=1, rank=0, host=dist.group.WORLD)
    manager.save(1, {"cursor": 1}, {}, hf, {MEGATRON: lambda path: _write(path, b"one")}, 0)

    def die(path: Path) -> None:
        _write(path, b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    manager.save(2, {"cursor": 2}, {}, hf, {MEGATRON: die}, 0)


def _write(path: Path, data: bytes) -> None:
    (path / "weights").write_bytes(data)
