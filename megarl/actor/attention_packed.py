"""Core attention of packed rows without Transformer Engine: torch SDPA, on CPU and CUDA.

A row holds segments one after another; attention never crosses a boundary. Segments of equal length
share one SDPA call. Under context parallelism a rank holds, of every segment cut into 2 * cp
chunks, chunks r and 2 * cp - 1 - r: keys and values are gathered over the group and put back in
order, and its own queries see what lies before them.

Sliding windows: with ``window`` w, the query at position i sees the keys at i - w + 1 to i.

Sinks: head h has a learnt logit s_h that takes part in its softmax and has no value::

    out_i = sum_j exp(z_ij) v_j / (exp(s_h) + sum_j exp(z_ij)),    z_ij = scale * q_i . k_j

That is attention with one more key, seen by every query, whose logit is s_h and whose value is 0.
Heads of a group share keys, so s_h comes with the query: with another dimension, in which queries
hold s_h / scale, the sink's key 1 and the other keys 0, SDPA computes exactly this, and s_h has its
gradient by plain autograd.
"""

import functools
import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from megarl.data.packing import local_index

_SINK_DIMS = 8  # one is used; fused kernels on CUDA want multiples of 8


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
    bounds: tuple[int, ...], cp: int, rank: int, window: int, masked: bool, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """For every distinct segment length: (queries [n, l/cp] into the local row, keys [n, l] into
    the gathered row, mask [l/cp, l]). The mask is None where plain causality says the same, unless
    it must be ``masked``. ``window`` 0: none."""
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
        mask = None
        if masked or cp > 1 or 0 < window < length:
            before = inside[:, None] - torch.arange(length)  # how far back a key lies
            mask = ((before >= 0) & (before < (window or length))).to(device)
        groups.append((queries.to(device), where[keys].to(device), mask))
    return groups


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed rows (thd): query [T/cp, heads, d] -> [T/cp, heads
    * d].

    ``softmax_offset`` [heads of this rank]: the sinks, where the configuration has them
    (``softmax_type="learnable"``); name and meaning are those of upstream's core attention.
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
        self.cp_group, self.tp_group = groups.cp, groups.tp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.window = 0
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size[0] + 1  # upstream counts the keys before the query
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            # without it the gradient norm would count the first rank's heads alone
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

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
        masked = self.softmax_offset is not None
        groups = _groups(bounds, cp, rank, self.window, masked, query.device)
        parts = [self._attend(query[q], key[k], value[k], mask) for q, k, mask in groups]
        order = torch.cat([q.reshape(-1) for q, _, _ in groups]).argsort()
        return torch.cat(parts)[order]

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """q [n, lq, heads, d], k and v [n, l, kv_heads, d] -> [n * lq, heads * d]."""
        if self.softmax_offset is not None:
            q, k, v, mask = self._with_sink(q, k, v, mask)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.size(2) != k.size(2),
        )
        if self.softmax_offset is not None:
            out = out[..., :-_SINK_DIMS]
        return out.transpose(1, 2).reshape(q.size(0) * q.size(1), -1)

    def _with_sink(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """The same with the sink's dimension and, in front of the others, its key. Values have the
        dimension too, with zeros: fused kernels want equal sizes.
        """
        assert self.softmax_offset is not None and mask is not None
        offset = F.pad((self.softmax_offset / self.scale)[:, None], (0, _SINK_DIMS - 1))
        q = torch.cat([q, offset.to(q.dtype).expand(*q.shape[:2], -1, -1)], -1)
        k, v = (F.pad(x, (0, _SINK_DIMS, 0, 0, 1, 0)) for x in (k, v))
        sink = torch.zeros(k.size(-1), dtype=k.dtype, device=k.device)
        sink[-_SINK_DIMS] = 1.0
        k = torch.cat([sink.expand(k.size(0), 1, k.size(2), -1), k[:, 1:]], 1)
        return q, k, v, F.pad(mask, (1, 0), value=True)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """The sinks are split by heads."""
        assert metadata is not None
        found: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return found


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm; its gradient is summed over the tensor-parallel ranks when they split the
    sequence.

    Upstream's wrapper refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
