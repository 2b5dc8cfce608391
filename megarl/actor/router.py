"""The router of packed rows, and the expert bias that keeps the experts' loads alike.

An expert bias (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3) moves the choice of experts and not
their gate weights. After an optimizer step, with c_e the tokens that expert e got in it, of all
ranks and microbatches, and E experts::

    bias_e += rate * sign(mean(c) - c_e)  =  rate * sign(sum(c) - E c_e)

Counts are integers, so the bias is the same to the last bit in every layout. Only true tokens of
the passes that made the step's gradients count: no padding, no log-prob pass, a recomputed layer
once. A step that is not taken moves nothing.

Upstream does this inside the backward pass, before it is known whether the step is taken, and its
mask of padding fits no [T, E] map; so the count and the update are ours, and upstream's is off.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter


class PackedRouter(TopKRouter):
    """Upstream's router; ``routed`` i64 [E]: the true tokens each expert got since ``forget``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.frozen_expert_bias = True  # to upstream
        zeros = torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device)
        self.register_buffer("routed", zeros, persistent=False)

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        """``routing_map`` bool [T, E]; ``padding_mask`` bool [T], True at padding."""
        if not (self.training and torch.is_grad_enabled()):
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        self.routed += routing_map.sum(0)


def forget_routed(chunks: Sequence[torch.nn.Module]) -> None:
    """A new optimizer step begins."""
    for router in _routers(chunks):
        router.routed.zero_()


def move_expert_bias(
    chunks: Sequence[torch.nn.Module], rate: float, stage: dist.ProcessGroup
) -> None:
    """The update above, of every router that has a bias and is not frozen. Collective over
    ``stage``, all ranks that hold these layers.
    """
    routers = [r for r in _routers(chunks) if r.expert_bias is not None and r.weight.requires_grad]
    if not routers or rate == 0:
        return
    counts = torch.stack([router.routed for router in routers])
    dist.all_reduce(counts, group=stage)
    direction = torch.sign(counts.sum(1, keepdim=True) - counts.size(1) * counts)
    for router, move in zip(routers, direction, strict=True):
        router.expert_bias += rate * move


def _routers(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        yield from (m for m in chunk.modules() if isinstance(m, PackedRouter))
