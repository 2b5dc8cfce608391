"""The two losses that a router may add, as docs/routers.md states them.

With z the router's logits [T, E] of a row's T true tokens, on all tp and cp ranks together::

    aux = coef E sum_e f_e P_e      f_e = share of the T k choices by score that fell on e
                                    P_e = mean over tokens of score_e / sum of scores
    z   = coef mean over tokens of (log sum_e exp z_e)^2

Upstream scales their gradients so that rows are averaged (``step.py``). Three things of upstream's
are otherwise: the balancing loss of a row without a true token is 0, where upstream divides by
zero; its number of tokens is an i64, as Transformer Engine's fused loss demands, where upstream has
an f32; and the z-loss of a row that ranks share is its mean over tokens, where upstream takes the
mean of the ranks' means.
"""

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter

from megarl.actor.router_metrics import RouterRecord


class RouterWithLosses(TopKRouter):
    record: RouterRecord

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """``probs`` with the loss's gradient attached. Scores and choices, both [T, E], are 0 at
        padding. Collective over tp and cp.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        per_expert = routing_map.sum(dim=0)
        dist.all_reduce(per_expert, group=self.tp_cp_group)
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=per_expert,
            total_num_tokens=(per_expert.sum() // self.topk).clamp(min=1),
            topk=self.topk,
            num_experts=self.num_experts,
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )
        self.record.aux += loss.detach() / coefficient
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(probs, loss)
        return attached

    def apply_z_loss(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``logits`` [T, E] with the loss's gradient attached; ``padding_mask`` bool [T]. A pass
        without gradients has none. Collective over tp and cp.
        """
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        assert padding_mask is not None, "step.py tells routers what is padding"
        tokens = (~padding_mask).sum()
        dist.all_reduce(tokens, group=self.tp_cp_group)
        squares = logits.logsumexp(-1).square().masked_fill(padding_mask, 0.0)
        loss = coefficient * squares.sum() / tokens.clamp(min=1)
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(logits, loss)
        return attached
