"""Per-sequence sums over a packed row: the only collective a loss sees.

A row may be split over context-parallel ranks. ``sum`` adds what each rank holds of a sequence; its
gradient is summed over the ranks as well, because every rank's loss depends on every rank's tokens.
A forward-only reduction would leave the loss right and the gradient wrong. Source:
docs/objectives.md, "GSPO under CP".
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.ops import segment_sum


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


@dataclass(frozen=True)
class Segments:
    """``cu_seqlens`` i32 [S + 1]: bounds in the local row; ``group``: the context-parallel ranks,
    None for one.
    """

    cu_seqlens: torch.Tensor
    group: dist.ProcessGroup | None = None

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """f64 [S]: the sum of every whole sequence. Collective over ``group``; differentiable."""
        local = segment_sum(values_T, self.cu_seqlens)
        if self.group is None or self.group.size() == 1:
            return local
        total: torch.Tensor = _SumOverRanks.apply(local, self.group)  # type: ignore[no-untyped-call]
        return total

    def expand(self, values_S: torch.Tensor) -> torch.Tensor:
        """[S] -> [T]: every token gets its sequence's value."""
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return values_S.repeat_interleave(lengths)

    @property
    def owns_sequences(self) -> bool:
        """Whether this rank counts sequences in metrics: one rank of the group does."""
        return self.group is None or self.group.rank() == 0
