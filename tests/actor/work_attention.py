"""The attention of packed rows by itself, on one rank or split by context parallelism."""

from typing import Any

import torch

from megarl.actor.attention_packed import PackedAttention, packed_seq_params
from megarl.actor.setup import init_parallel
from megarl.data.packing import local_index
from megarl.mesh import Mesh


def attend(
    rank: int,
    cp: int,
    bounds: tuple[int, ...],
    inputs: dict[str, torch.Tensor],
    window: int,
    sinks: torch.Tensor | None,
    upstream: torch.Tensor,
) -> dict[str, Any]:
    """Output and gradients at this rank's positions of a row, for the gradient ``upstream`` of the
    output. ``inputs``: query, key, value [T, heads, d].
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel = init_parallel(Mesh(cp=cp), seed=1, timeout_s=60)
    heads, size = inputs["query"].shape[1:]
    config = TransformerConfig(
        num_layers=2,
        hidden_size=heads * size,
        num_attention_heads=heads,
        num_query_groups=inputs["key"].shape[1],
        kv_channels=size,
        context_parallel_size=cp,
        use_cpu_initialization=True,
        softmax_type="vanilla" if sinks is None else "learnable",
        window_size=(window - 1, 0) if window else None,
        window_attn_skip_freq=[0, 1] if window else None,  # the second layer's, which this one is
    )
    try:
        module = PackedAttention(config, layer_number=2, attn_mask_type=None, attention_type="self")
        if sinks is not None:
            module.softmax_offset.data.copy_(sinks)
        module.to(parallel.device)
        index = local_index(bounds, cp, parallel.at.cp)
        mine = {n: x[index].to(parallel.device).requires_grad_() for n, x in inputs.items()}
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=parallel.device)
        out = module(*mine.values(), packed_seq_params=packed_seq_params(cu_seqlens))
        out.backward(upstream[index].to(parallel.device))
        found = {"out": out.detach(), **{name: x.grad for name, x in mine.items()}}
        if sinks is not None:
            found["sinks"] = module.softmax_offset.grad
        return {"index": index, **{name: x.cpu() for name, x in found.items()}}
    finally:
        parallel_state.destroy_model_parallel()
