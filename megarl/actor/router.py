"""The experts' router: upstream's, with the differences that the families need."""

from collections.abc import Callable
from typing import Any

import torch

from megarl.actor.replay import TopK
from megarl.actor.router_losses import RouterWithLosses
from megarl.actor.router_metrics import RouterRecord

_FP32 = ("expert_bias", "local_tokens_per_expert")


class Router(RouterWithLosses):
    """Every MoE layer's router (``layers.py`` is the one place that names it).

    1. The expert bias stays fp32 when the model is converted: rounded to bf16 it would choose other
       experts than the servers do, and it would not survive a way through files.
    2. Gate weights of a sigmoid router that are not renormalised: upstream always renormalises.
    3. It counts the true tokens that each expert gets in training (``routed``, i64 [E]), for
       ``expert_bias.py``. Upstream's count takes a mask of padding that fits no [T, E] map, and its
       update comes inside the backward pass, before it is known whether the step is taken.
    4. Its choices can be replayed or recorded (``replay.py``). Replayed tokens do not count.
    5. It records what it does in training (``router_metrics.py``), and its losses are those of
       ``router_losses.py``.

    ``keeps_bias``: the expert bias is frozen.
    """

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.frozen_expert_bias = True  # to upstream
        zeros = torch.zeros(self.num_experts, dtype=torch.int64, device=torch.cuda.current_device())
        self.register_buffer("routed", zeros, persistent=False)
        self.record = RouterRecord(self.num_experts, zeros.device)
        self.keeps_bias = False
        self.renormalise = config.renormalise_gates
        self.router_replay = TopK()  # which upstream's top-k asks

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kept = {name: self._buffers[name] for name in _FP32 if name in self._buffers}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            converted = self._buffers[name]
            assert tensor is not None and converted is not None
            self._buffers[name] = tensor.to(converted.device)
        return self

    def _apply_expert_bias(
        self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> None:
        """Count. ``routing_map`` bool [T, E]; ``padding_mask`` bool [T], True at padding. A pass
        without gradients does not count: log-probs, and the first of two where activations are
        recomputed. Neither do tokens whose choice is replayed: it is not this router's.
        """
        if self.counts:
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask[:, None]
            if (replayed := self.router_replay.replayed) is not None:
                routing_map = routing_map & ~replayed[:, None]
            self.routed += routing_map.sum(0)

    @property
    def counts(self) -> bool:
        """Whether this pass makes gradients: of two where activations are recomputed the second."""
        return bool(self.training and torch.is_grad_enabled())

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """(gate weights [T, E], zero where not chosen; choice bool [T, E]) of logits [T, 1, E]."""
        weights, chosen = super().routing(logits, padding_mask=padding_mask)
        if self.counts:
            padding = None if padding_mask is None else padding_mask.reshape(-1)
            self.record.add(logits.view(chosen.shape), chosen, padding, self.score_function)
        if self.renormalise or self.score_function != "sigmoid":
            return weights, chosen
        scores = logits.view(weights.shape).float().sigmoid() * chosen
        return weights * scores.sum(-1, keepdim=True).type_as(weights), chosen
