"""Per-sequence sums over a packed row: the only collective a loss sees.

A row may be split over context-parallel ranks; ``sums`` adds what each rank holds of a sequence.
Nothing here is differentiated: objectives know their gradients in closed form from these sums
(``surrogates.py``), so that there is one all-reduce in the forward pass and none in the backward
pass. Source: docs/objectives.md, "GSPO under CP".
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.ops import segment_sum


@dataclass(frozen=True)
class Segments:
    """``cu_seqlens`` i32 [S + 1]: bounds in the local row; ``group``: the context-parallel ranks,
    None for one.
    """

    cu_seqlens: torch.Tensor
    group: dist.ProcessGroup | None = None

    def sums(self, *values_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """f64 [S] each: sums of every whole sequence of f32, f64 or bool rows. One all-reduce over
        ``group`` for all of them.
        """
        rows = [v.detach() if v.is_floating_point() else v.float() for v in values_T]
        local = torch.stack([segment_sum(row, self.cu_seqlens) for row in rows])
        self.reduce(local)
        return local.unbind()

    def reduce(self, sums: torch.Tensor) -> None:
        """Add what the other ranks of ``group`` hold, in place."""
        if self.is_split:
            dist.all_reduce(sums, group=self.group)

    @property
    def is_split(self) -> bool:
        """Whether other ranks hold parts of this row's sequences."""
        return self.group is not None and self.group.size() > 1

    def expand(self, values_S: torch.Tensor) -> torch.Tensor:
        """[S] -> [T]: every token gets its sequence's value."""
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return values_S.repeat_interleave(lengths)

    @property
    def owns_sequences(self) -> bool:
        """Whether this rank counts sequences in metrics: one rank of the group does."""
        return self.group is None or self.group.rank() == 0
