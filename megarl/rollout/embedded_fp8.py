"""The embedded server computing as a server of FP8 weights does.

What layers multiply with are copies: of weights e4m3 in blocks of 128 x 128, made anew as often as
they change, of activations in 1 x 128, at every step; sums are fp32 and rounded once, to the
server's precision (``models/fp8_export.py``, ``ops/fp8_emulation.py``).

1. Of a folder in FP8, weights are what the codes that it holds, or that arrived, stand for; what is
   not in codes is multiplied as it is, activations too.
2. Of a plain folder, rounded are the linears of the layers, experts included; norms, embeddings,
   routers and gates of shared experts, the output layer, biases, keys and values are not. Weights
   arrive, are kept and are digested as they are sent.
3. Then gate and up are two matrices, as in files; queries, keys and values three. A trainer that
   holds them as one has other blocks where they are no whole blocks of 128.
4. And they have the codes and scales that an export has. A matrix that an export leaves alone,
   since its blocks would not be whole, is rounded here, too.
5. An expert's inner activations are rounded before the router's weight scales them.
6. Everything acts on rows alone: a row's bits do not depend on its neighbours.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.errors import ConfigError, Problem
from megarl.models.fp8_export import BLOCK, SCALES, fp8_weight
from megarl.models.live_weights import LiveWeights
from megarl.ops.fp8_block import fp8_block_dequant
from megarl.ops.fp8_emulation import blockwise, finite_rows, with_bad
from megarl.rollout.embedded_kernels import experts_of

_NOT_ROUNDED = ("gate", "router", "shared_expert_gate", "eh_proj")
Rows = Callable[[Tensor], Tensor]
Rounded = Callable[[str, Tensor], Tensor]  # (name in files, weight [N, K]) -> f32 [N, K]


class Fp8Weights:
    """The rounded copies for a transformers module, whose linears compute with them from now on."""

    def __init__(self, module: torch.nn.Module, weights: LiveWeights, scales: str) -> None:
        """Raises ConfigError where ``weights`` are in other blocks or have scales of another kind,
        or where some of a layer's experts are plain.
        """
        blocks = weights.blocks
        if blocks is not None and blocks.block != BLOCK:
            found = f"{scales} of a model in blocks of {list(blocks.block)}"
            raise ConfigError([Problem("fp8", found, f"none, or blocks of {list(BLOCK)}")])
        if blocks is not None and blocks.scales not in (None, scales):
            accepted = f"none or {blocks.scales}, as the model's own scales"
            raise ConfigError([Problem("fp8", scales, accepted)])
        self._rows = partial(_rows, power_of_two=SCALES[scales])
        self._rounded: Rounded = partial(_rounded, weights, scales)
        self._linears = {
            f"{name}.weight": linear
            for name, linear in _linears(module)
            if _multiplied(weights, [f"{name}.weight"])
        }
        self._experts = [
            Fp8Experts(name, experts, self._rows, self._rounded)
            for name, experts in experts_of(module)
            if _multiplied(weights, [n for n in weights.names() if n.startswith(f"{name}.")])
        ]
        self.refresh()
        for linear in self._linears.values():
            linear.forward = partial(self._forward, linear)

    @torch.no_grad()
    def refresh(self) -> None:
        """The weights have changed."""
        for name, linear in self._linears.items():
            linear.rounded_weight = self._rounded(name, linear.weight)
        for experts in self._experts:
            experts.refresh()

    def tensors(self) -> Iterator[Tensor]:
        for linear in self._linears.values():
            yield linear.rounded_weight
        for experts in self._experts:
            yield from (experts.into, experts.out_of)

    def _forward(self, linear: Any, x: Tensor) -> Tensor:
        y = F.linear(self._rows(x), linear.rounded_weight).to(x.dtype)
        return y if linear.bias is None else y + linear.bias


class Fp8Experts:
    """A layer's experts as ``dense_experts`` multiplies with them: its attribute ``fp8``."""

    def __init__(self, name: str, experts: Any, rows: Rows, rounded: Rounded) -> None:
        self.rows, self._name, self._experts, self._rounded = rows, name, experts, rounded
        experts.fp8 = self

    def refresh(self) -> None:
        gate_up, down = self._experts.gate_up_proj, self._experts.down_proj
        if self._experts.is_transposed:  # [E, H, 2I] of alternating rows, [E, I, H]
            into = [self._rounded(self._name, one.t().contiguous()) for one in gate_up]
            out_of = [self._rounded(self._name, one.t().contiguous()).t() for one in down]
        else:  # [E, 2I, H], [E, H, I]
            into = [
                self._rounded(f"{self._name}.{i}.{part}_proj.weight", half)
                for i, one in enumerate(gate_up)
                for part, half in zip(("gate", "up"), one.chunk(2), strict=True)
            ]
            out_of = [
                self._rounded(f"{self._name}.{i}.down_proj.weight", one).t()
                for i, one in enumerate(down)
            ]
        self.into = torch.cat(into)  # f32 [E * 2I, H]
        self.out_of = torch.cat(out_of)  # f32 [E * I, H]


def _linears(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        of_layer = isinstance(part, torch.nn.Linear) and ".layers." in name
        if of_layer and name.split(".")[-1] not in _NOT_ROUNDED:
            yield name, part


def _multiplied(weights: LiveWeights, names: list[str]) -> bool:
    """Whether a module with these weights multiplies rounded numbers."""
    if weights.blocks is None:
        return True
    plain = [name for name in names if name not in weights.codes]
    if plain and len(plain) < len(names):
        found = f"a model of which {plain[0]} is plain, and others of its layer's experts are not"
        raise ConfigError([Problem("fp8", found, "none, or all experts of a layer in FP8")])
    return not plain


def _rounded(weights: LiveWeights, scales: str, name: str, weight: Tensor) -> Tensor:
    """f32: what the codes that the server holds stand for, or those that an export would have."""
    if name in weights.codes:
        return weights.values(name, torch.float32)
    codes, its_scales = fp8_weight(weight, scales)
    return fp8_block_dequant(codes, its_scales, dtype=torch.float32)


def _rows(x: Tensor, power_of_two: bool) -> Tensor:
    """x [..., K] -> f32; a row with NaN or infinities is all NaN."""
    rows, bad = finite_rows(x.reshape(-1, x.shape[-1]))
    rounded = blockwise(rows, block=(1, 128), format="e4m3", power_of_two=power_of_two)
    return with_bad(rounded, bad).view(x.shape)
