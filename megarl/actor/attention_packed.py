"""Core attention of packed rows without Transformer Engine: torch SDPA, on CPU and CUDA.

A row holds segments one after another; attention never crosses a boundary. Segments of equal length
share one SDPA call. Under context parallelism a rank holds, of every segment cut into 2 * cp
chunks, chunks r and 2 * cp - 1 - r: keys and values are gathered over the group and put back in
order, and its own queries see what lies before them.
"""

import functools
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from megarl.data.packing import local_index


def packed_seq_params(cu_seqlens: torch.Tensor) -> PackedSeqParams:
    """``cu_seqlens`` i32 [S + 1]: padded bounds. Padding sits at a segment's end, where causality
    hides it.
    """
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


@functools.lru_cache(maxsize=64)
def _groups(
    bounds: tuple[int, ...], cp: int, rank: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """For every distinct segment length: (queries [n, l/cp] into the local row, keys [n, l] into
    the gathered row, mask [l/cp, l] or None where plain causality serves)."""
    width = bounds[-1] // cp
    where = torch.empty(bounds[-1], dtype=torch.long)  # row position -> index in the gathered row
    for r in range(cp):
        where[local_index(bounds, cp, r)] = torch.arange(r * width, (r + 1) * width)
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(bounds):
        if end > start:
            starts.setdefault(end - start, []).append(start)
    groups = []
    for length, first in starts.items():
        inside = local_index(
            (0, length), cp, rank
        )  # positions of this rank's queries inside a segment
        keys = torch.tensor(first)[:, None] + torch.arange(length)
        queries = where[keys[:, inside]] - rank * width
        mask = None if cp == 1 else (inside[:, None] >= torch.arange(length)).to(device)
        groups.append((queries.to(device), where[keys].to(device), mask))
    return groups


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed rows (thd): query [T/cp, heads, d] -> [T/cp, heads
    * d].
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", (
            "rows are packed"
        )
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if cp > 1:  # gradients of keys and values are reduce-scattered back
            key = gather_from_sequence_parallel_region(key.contiguous(), group=self.cp_group)
            value = gather_from_sequence_parallel_region(value.contiguous(), group=self.cp_group)
        bounds = tuple(packed_seq_params.cu_seqlens_q.tolist())
        groups = _groups(bounds, cp, rank, query.device)
        parts = [self._attend(query[q], key[k], value[k], mask) for q, k, mask in groups]
        order = torch.cat([q.reshape(-1) for q, _, _ in groups]).argsort()
        return torch.cat(parts)[order]

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """q [n, lq, heads, d], k and v [n, l, kv_heads, d] -> [n * lq, heads * d]."""
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.size(2) != k.size(2),
        )
        return out.transpose(1, 2).reshape(q.size(0) * q.size(1), -1)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm; its gradient is summed over the tensor-parallel ranks when they split the
    sequence.

    Upstream's wrapper refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
