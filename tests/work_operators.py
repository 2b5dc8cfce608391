"""What workers do in tests of a run's choice of ops."""

import torch
import torch.distributed as dist

from megarl import operators
from megarl.errors import RunError
from megarl.ops import segment_sum


def agreements(rank: int, chosen: list[dict[str, str]]) -> dict[str, str] | str:
    """What rank r finds where its ops are ``chosen[r]``; an error's text."""
    original = operators.backends
    operators.backends = lambda ops, device: {op: "native" for op in ops} | chosen[rank]
    try:
        return operators.agreed_backends(torch.device("cpu"), dist.group.WORLD)
    except RunError as e:
        return str(e)
    finally:
        operators.backends = original


def counted(rank: int, calls: int) -> tuple[int, dict[str, int] | None]:
    """(this rank's earlier calls of segment_sum, all ranks' afterwards on rank 0)."""
    before = sum(operators.call_counts().get("segment_sum", {}).values())
    for _ in range(calls * (rank + 1)):
        segment_sum(torch.ones(2), torch.tensor([0, 2]))
    total = operators.all_calls(dist.group.WORLD)
    return before, None if total is None else total["segment_sum"]
