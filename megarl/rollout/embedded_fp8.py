"""The embedded server computing as a server of FP8 weights does.

Weights arrive, are kept and are digested as they are sent. What is multiplied with are copies of
them, rounded to e4m3 in blocks of 128 x 128 as often as they change, and rows of activations,
rounded in 1 x 128 at every step; sums are fp32 and rounded once, to the server's precision
(``models/fp8_export.py``, ``ops/fp8_emulation.py``).

1. Rounded are the linears of the layers, experts included; norms, embeddings, routers and gates of
   shared experts, the output layer, biases, keys and values are not.
2. Gate and up are two matrices, as in files; queries, keys and values three. A trainer that holds
   them as one has other blocks where they are no whole blocks of 128.
3. An expert's inner activations are rounded before the router's weight scales them.
4. Weights have the codes and scales that an export has. A matrix that an export leaves alone, since
   its blocks would not be whole, is rounded here, too.
5. Everything acts on rows alone: a row's bits do not depend on its neighbours.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.fp8_export import SCALES, fp8_weight
from megarl.ops.fp8_block import fp8_block_dequant
from megarl.ops.fp8_emulation import blockwise, finite_rows, with_bad

_NOT_ROUNDED = ("gate", "router", "shared_expert_gate", "eh_proj")
Rounded = Callable[[Tensor], Tensor]


class Fp8Weights:
    """The rounded copies for a transformers module, whose linears compute with them from now on."""

    def __init__(self, module: torch.nn.Module, experts: list[Any], scales: str) -> None:
        self._rows = partial(_rows, power_of_two=SCALES[scales])
        self._blocks = partial(_blocks, scales=scales)
        self._linears = list(_linears(module))
        self._experts = [Fp8Experts(e, self._rows, self._blocks) for e in experts]
        self.refresh()
        for linear in self._linears:
            linear.forward = partial(self._forward, linear)

    @torch.no_grad()
    def refresh(self) -> None:
        """The weights have changed."""
        for linear in self._linears:
            linear.rounded_weight = self._blocks(linear.weight)
        for experts in self._experts:
            experts.refresh()

    def _forward(self, linear: Any, x: Tensor) -> Tensor:
        y = F.linear(self._rows(x), linear.rounded_weight).to(x.dtype)
        return y if linear.bias is None else y + linear.bias


class Fp8Experts:
    """A layer's experts as ``dense_experts`` multiplies with them: its attribute ``fp8``."""

    def __init__(self, experts: Any, rows: Rounded, blocks: Rounded) -> None:
        self.rows, self._experts, self._blocks = rows, experts, blocks
        experts.fp8 = self

    def refresh(self) -> None:
        gate_up, down = self._experts.gate_up_proj, self._experts.down_proj
        if self._experts.is_transposed:  # [E, H, 2I] of alternating rows, [E, I, H]
            into = [self._blocks(one.t().contiguous()) for one in gate_up]
            out_of = [self._blocks(one.t().contiguous()).t() for one in down]
        else:  # [E, 2I, H], [E, H, I]
            into = [self._blocks(half) for one in gate_up for half in one.chunk(2)]
            out_of = [self._blocks(one).t() for one in down]
        self.into = torch.cat(into)  # f32 [E * 2I, H]
        self.out_of = torch.cat(out_of)  # f32 [E * I, H]


def _linears(module: torch.nn.Module) -> Iterator[Any]:
    for name, part in module.named_modules():
        of_layer = isinstance(part, torch.nn.Linear) and ".layers." in name
        if of_layer and name.split(".")[-1] not in _NOT_ROUNDED:
            yield part


def _blocks(weight: Tensor, scales: str) -> Tensor:
    """weight [N, K] -> f32: what an export to FP8 has in its place."""
    codes, its_scales = fp8_weight(weight, scales)
    return fp8_block_dequant(codes, its_scales, dtype=torch.float32)


def _rows(x: Tensor, power_of_two: bool) -> Tensor:
    """x [..., K] -> f32; a row with NaN or infinities is all NaN."""
    rows, bad = finite_rows(x.reshape(-1, x.shape[-1]))
    rounded = blockwise(rows, block=(1, 128), format="e4m3", power_of_two=power_of_two)
    return with_bad(rounded, bad).view(x.shape)
