"""The two computations that the embedded server gives transformers models in place of theirs.

Both act on rows alone, so that a row's bits depend on nothing but its own token, position and slot
(``embedded_model.py``). Importing this module makes them known to transformers by name.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DENSE_EXPERTS = "megarl_dense"
ROW_ATTENTION = "megarl_rows"


def experts_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of every layer's experts."""
    for name, part in module.named_modules():
        if hasattr(part, "down_proj") and hasattr(part, "num_experts"):
            yield name, part


def has_dense_form(experts: torch.nn.Module) -> bool:
    """Gated experts as transformers stacks them: [gate; up] rows, or transposed, in any order that
    their own ``_apply_gate`` undoes.
    """
    gated = getattr(experts, "has_gate", False) and hasattr(experts, "_apply_gate")
    transposed = getattr(experts, "is_transposed", False)
    return gated and (transposed or getattr(experts, "is_concatenated", False))


def dense_experts(
    experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Every expert for every row as two matrix products; the router's weights, 0 where an expert
    was not chosen, scale between them, so the second product also sums over the experts.

    `hidden` [n, H]; `index`, `weights` [n, K]. With `experts.fp8` (``embedded_fp8.py``) both
    products are of rounded numbers, in fp32.
    """
    rows, width = hidden.shape
    dtype, fp8 = hidden.dtype, getattr(experts, "fp8", None)
    share = hidden.new_zeros(rows, experts.num_experts).scatter_(1, index, weights.to(dtype))
    if fp8 is not None:
        hidden, into, out_of = fp8.rows(hidden), fp8.into, fp8.out_of
    elif experts.is_transposed:  # gate_up [E, H, 2I], down [E, I, H]
        into = experts.gate_up_proj.transpose(1, 2).reshape(-1, width)
        out_of = experts.down_proj.reshape(-1, width)
    else:  # [E, 2I, H], [E, H, I]
        into = experts.gate_up_proj.reshape(-1, width)
        out_of = experts.down_proj.transpose(1, 2).reshape(-1, width)
    bias = experts.gate_up_proj_bias.reshape(-1).to(into.dtype) if experts.has_bias else None
    inner = F.linear(hidden, into, bias).to(dtype).view(rows, experts.num_experts, -1)
    inner = experts._apply_gate(inner)
    inner = (inner if fp8 is None else fp8.rows(inner)) * share[..., None]
    out = (inner.view(rows, -1) @ out_of).to(dtype)
    return out + share @ experts.down_proj_bias if experts.has_bias else out


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of single-token rows: query heads that share a key head are one small matrix, so
    keys are not copied per query head. Longer queries go to SDPA, unless there are sinks.

    `query` [n, heads, l, D]; `key`, `value` [n, key heads, C, D]; mask bool [n, 1, l, C], True:
    visible; `s_aux` [heads]: a logit that takes part in the softmax and has no value.
    """
    n, heads, length, size = query.shape
    if attention_mask is None or (length != 1 and s_aux is None):
        assert s_aux is None, "sinks come with a mask"
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    groups = key.shape[1]
    grouped = query.reshape(n, groups, -1, size)
    scores = torch.matmul(grouped, key.transpose(2, 3)).float()
    scores.mul_(size**-0.5 if scaling is None else scaling)
    scores = scores.view(n, groups, heads // groups, length, -1)
    scores.masked_fill_(~attention_mask[:, :, None], float("-inf"))
    if s_aux is not None:
        sink = s_aux.float().view(1, groups, -1, 1, 1).expand(n, -1, -1, length, -1)
        scores = torch.cat([scores, sink], -1)
    shares = scores.softmax(dim=-1).to(value.dtype)[..., : key.shape[2]]
    out = torch.matmul(shares.view(n, groups, -1, key.shape[2]), value)
    return out.view(n, heads, length, -1).transpose(1, 2).contiguous(), None


ALL_EXPERTS_FUNCTIONS.register(DENSE_EXPERTS, dense_experts)
ALL_ATTENTION_FUNCTIONS.register(ROW_ATTENTION, row_attention)
