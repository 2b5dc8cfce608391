"""Multi-head latent attention (DeepSeek-V2, section 2.1) on packed rows.

Upstream's module computes it; what is replaced here:

1. Norms on the latents have an epsilon of their own, and without ``q_rank`` there is none on
   queries. Projections and norms are those of the layer spec.
2. Rotary angles are those of the packed row.

And without Transformer Engine:

3. The two down-projections are whole on every tensor-parallel rank and see its part of the
   sequence, as Transformer Engine's are. Upstream's local ones are split and gathered, and the
   gathering's backward does not sum what the ranks' heads say about the rotary key they share: its
   gradient would be that of the last rank's heads alone.
4. Values are not padded to the width of keys.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megarl.actor.rotary import PackedRotaryEmbedding
from megarl.models.spec import ModelSpec

_OF_THE_SPEC = (
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "q_layernorm",
    "kv_layernorm",
)


class ReplicatedLinear(torch.nn.Module):
    """[s, b, in] -> [s, b, out], every tensor-parallel rank its part of the sequence."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # Megatron is to sum the ranks' gradients
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._forward_impl(hidden, self.weight), None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(input, weight)


class LatentAttention(MLASelfAttention):
    """Made for ``spec``, whose ``mla`` is set."""

    def __init__(self, config: Any, *args: Any, spec: ModelSpec, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        assert spec.mla is not None
        for latent in ("q", "kv") if spec.mla.q_rank else ("kv",):
            norm = getattr(self, f"{latent}_layernorm")
            if isinstance(norm, IdentityOp):  # it is part of the projection behind it
                norm = getattr(self, f"linear_{latent}_up_proj")
            assert hasattr(norm, "eps"), norm
            norm.eps = spec.mla.norm_eps
        self.rotary_pos_emb = PackedRotaryEmbedding(spec, with_factor=spec.yarn is not None)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """As the layer spec says. Upstream would put a norm in front of direct queries."""
        return {name: getattr(submodules, name) for name in _OF_THE_SPEC}


class LocalLatentAttention(LatentAttention):
    """Without Transformer Engine."""

    def __init__(self, config: Any, *args: Any, spec: ModelSpec, **kwargs: Any) -> None:
        super().__init__(config, *args, spec=spec, **kwargs)
        mla = spec.mla
        assert mla is not None
        if mla.q_rank:
            self.linear_q_down_proj = ReplicatedLinear(config, spec.hidden, mla.q_rank)
        self.linear_kv_down_proj = ReplicatedLinear(config, spec.hidden, mla.kv_rank + mla.rope_dim)

    def _run_core_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        out: torch.Tensor = self.core_attention(query, key, value, attention_mask, **kwargs)
        return out
