"""The experts' router: upstream's, with the differences that the families need."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

_FP32 = ("expert_bias", "local_tokens_per_expert")


class Router(TopKRouter):
    """Every MoE layer's router (``layers.py`` is the one place that names it).

    1. The expert bias stays fp32 when the model is converted: rounded to bf16 it would choose other
       experts than the servers do, and it would not survive a way through files.
    2. Gate weights of a sigmoid router that are not renormalised: upstream always renormalises.
    3. The bias takes part in the choice and is not updated.
    """

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.frozen_expert_bias = True
        self.renormalise = config.renormalise_gates

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        kept = {name: self._buffers[name] for name in _FP32 if name in self._buffers}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            converted = self._buffers[name]
            assert tensor is not None and converted is not None
            self._buffers[name] = tensor.to(converted.device)
        return self

    def _apply_expert_bias(self, *args: Any, **kwargs: Any) -> None:
        """Counts no tokens."""

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """(gate weights [T, E], zero where not chosen; choice bool [T, E]) of logits [T, 1, E]."""
        weights, chosen = super().routing(logits, padding_mask=padding_mask)
        if self.renormalise or self.score_function != "sigmoid":
            return weights, chosen
        scores = logits.view(weights.shape).float().sigmoid() * chosen
        return weights * scores.sum(-1, keepdim=True).type_as(weights), chosen
