"""FP8 matrix products on Megatron's own linears, on any machine: operands are rounded as
Transformer Engine's recipe rounds them (``ops/fp8_emulation.py``) and multiplied in fp32.

Of a linear y = x W^T, x [T, K], W [N, K], the three products and what each operand shares scales
over, by recipe (a scale cannot vary along the dimension that is summed over and be taken out of the
sum; within it, blocks can):

    product        summed over   x            W            dY         tensorwise, delayed
    y  = x W^T     K             1 x 128      128 x 128               one of each tensor, the same
    dx = dY W      N                          128 x 128    1 x 128    in both products that it
    dW = dY^T x    T             128 x 1                   128 x 1    takes part in

mxfp8 has 32 entries along the dimension that is summed over, of W too. Inputs and weights are e4m3;
output gradients e4m3, or e5m2 with ``format: hybrid``.

1. What goes over the network is what goes without FP8, in the activations' precision: sequence
   parallelism gathers inputs before they are quantised. Blocks therefore do not depend on how a
   sequence is split; blocks of a matrix that is split are those of one process where its shards
   are whole blocks (128; mxfp8 32).
2. tensorwise: a shard of a weight, or of an input that tensor parallelism splits, has a scale of
   its own.
3. Products are rounded once, to the activations' precision; dW likewise, and summed over
   microbatches as ``precision.grad_reduce_dtype`` says.
4. Rows with NaN or infinities have NaN as their result and count in no scale; a gradient with one
   makes dW NaN. ``train.on_nonfinite`` then acts as without FP8. A weight with one is an error.
5. Biases are added, and their gradients summed, outside FP8.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.actor.fp8_delayed import DelayedScaling, Scales
from megarl.actor.latent_attention import ReplicatedLinear
from megarl.actor.names import global_parameters
from megarl.actor.setup import Parallel
from megarl.config.fp8 import Fp8Section
from megarl.ops.fp8_emulation import (
    blockwise,
    finite_rows,
    mxfp8,
    scaled,
    tensorwise,
    with_bad,
)

LINEARS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


@dataclass(frozen=True)
class Fp8Recipe:
    """How a module computes: its attribute ``fp8``."""

    name: str
    forward: str  # format of inputs and weights
    backward: str  # of output gradients
    power_of_two: bool

    @classmethod
    def of(cls, section: Fp8Section) -> "Fp8Recipe":
        backward = {"e4m3": "e4m3", "hybrid": "e5m2"}[section.format]
        return cls(section.recipe, "e4m3", backward, section.scales == "power_of_two")

    @property
    def settings(self) -> dict[str, str]:
        """In the words of ``Fp8Section``."""
        format = "e4m3" if self.backward == self.forward else "hybrid"
        found = {"recipe": self.name, "format": format}
        if self.name == "blockwise":
            found["scales"] = "power_of_two" if self.power_of_two else "f32"
        return found


def emulate_fp8(model: Sequence[GPTModel], parallel: Parallel, section: Fp8Section) -> None:
    """Let the linears of the chunks' decoder layers compute in FP8, but for the first and last
    layers that ``section`` leaves in bf16. Routers, embeddings, the output layer and layers for
    multi-token prediction are none of them.
    """
    recipe = Fp8Recipe.of(section)
    names = {id(p): name for name, p in global_parameters(model, parallel)}
    for chunk in model:
        linears = list(_linears(chunk, section))
        called = [names[id(linear.weight)].removesuffix(".weight") for linear in linears]
        delayed = None
        if recipe.name == "delayed" and linears:
            delayed = DelayedScaling(
                called, section, (recipe.forward, recipe.backward), parallel.stage, parallel.device
            )
            delayed.attach(chunk)
        for place, (linear, name) in enumerate(zip(linears, called, strict=True)):
            linear.fp8 = recipe
            linear._forward_impl = Products(name, recipe, linear, delayed, place)


def _linears(chunk: Any, section: Fp8Section) -> Iterator[Any]:
    layers = chunk.config.num_layers
    for layer in chunk.decoder.layers:
        at = layer.layer_number - 1
        if section.first_layers_bf16 <= at < layers - section.last_layers_bf16:
            yield from (m for m in layer.modules() if isinstance(m, LINEARS))


@dataclass
class Products:
    """Stands in for a linear's ``_forward_impl``, with its arguments."""

    name: str
    recipe: Fp8Recipe
    linear: torch.nn.Module
    delayed: DelayedScaling | None
    place: int  # among the tensors of ``delayed``

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gradient_accumulation_fusion: bool = False,  # the gradient is returned: DDP adds it
        allreduce_dgrad: bool = False,  # of tensor parallelism without sequence parallelism
        sequence_parallel: bool = False,
        tp_group: Any = None,
        grad_output_buffer: Any = None,
        wgrad_deferral_limit: int | None = None,
        gtp_remat_size: int = 1,
    ) -> Tensor:
        assert not allreduce_dgrad, "settings that Megarl has not"
        assert grad_output_buffer is None and gtp_remat_size == 1, "settings that Megarl has not"
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=tp_group
            )
        grad_enabled = torch.is_grad_enabled()  # which a function of autograd cannot see
        output: Tensor = _Linear.apply(input, weight, self, grad_enabled)
        return output if bias is None else output + bias

    def scales(self, x: Tensor, weight: Tensor, grad_enabled: bool) -> Scales:
        if self.delayed is None:
            return None, None
        return self.delayed.forward(
            self.place, x, weight, training=self.linear.training, grad_enabled=grad_enabled
        )

    def gradient_scale(self, dy: Tensor) -> Tensor | None:
        return None if self.delayed is None else self.delayed.backward(self.place, dy)

    def end_backward(self) -> None:
        if self.delayed is not None:
            self.delayed.end_backward(self.place)

    def input(self, x: Tensor, scale: Tensor | None, *, over_rows: bool) -> Tensor:
        return self._operand(x, self.recipe.forward, scale, over_rows)

    def gradient(self, dy: Tensor, scale: Tensor | None, *, over_rows: bool) -> Tensor:
        return self._operand(dy, self.recipe.backward, scale, over_rows)

    def weight(self, weight: Tensor, scale: Tensor | None, *, over_rows: bool) -> Tensor:
        try:
            if self.recipe.name == "blockwise":
                return _blocks(self.recipe, self.recipe.forward, (128, 128))(weight)
            return self._operand(weight, self.recipe.forward, scale, over_rows)
        except RuntimeError as e:
            raise RuntimeError(f"{self.name}.weight cannot be quantised: {e}") from e

    def _operand(self, x: Tensor, format: str, scale: Tensor | None, over_rows: bool) -> Tensor:
        """``over_rows``: the product sums over x's rows, else over its columns."""
        rounded = _ROUNDINGS[self.recipe.name](self.recipe, format, scale)
        return rounded(x.t().contiguous()).t() if over_rows else rounded(x)


Rounding = Callable[[Tensor], Tensor]


def _blocks(recipe: Fp8Recipe, format: str, block: tuple[int, int]) -> Rounding:
    return partial(blockwise, block=block, format=format, power_of_two=recipe.power_of_two)


def _delayed(recipe: Fp8Recipe, format: str, scale: Tensor | None) -> Rounding:
    assert scale is not None
    return partial(scaled, multiplier=scale, format=format)


_ROUNDINGS: dict[str, Callable[[Fp8Recipe, str, Tensor | None], Rounding]] = {
    "tensorwise": lambda recipe, format, scale: partial(tensorwise, format=format),
    "delayed": _delayed,
    "blockwise": lambda recipe, format, scale: _blocks(recipe, format, (1, 128)),
    "mxfp8": lambda recipe, format, scale: partial(mxfp8, format=format),
}


class _Linear(torch.autograd.Function):
    """x [..., K], W [N, K] -> x W^T [..., N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, of: Products, grad_enabled: bool) -> Tensor:
        rows, bad = finite_rows(x.reshape(-1, x.shape[-1]))
        ctx.of, ctx.scales = of, of.scales(rows, weight, grad_enabled)
        ctx.save_for_backward(x, weight)
        scale, weight_scale = ctx.scales
        y = (
            of.input(rows, scale, over_rows=False)
            @ of.weight(weight, weight_scale, over_rows=False).t()
        )
        return with_bad(y, bad).to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of: Products = ctx.of
        x, weight = ctx.saved_tensors
        scale, weight_scale = ctx.scales
        (dy,) = gradients
        dy, bad = finite_rows(dy.reshape(-1, dy.shape[-1]))
        dy_scale = of.gradient_scale(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = of.gradient(dy, dy_scale, over_rows=False) @ of.weight(
                weight, weight_scale, over_rows=True
            )
            dx = with_bad(dx, bad).to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            rows, bad_x = finite_rows(x.reshape(-1, x.shape[-1]))
            dw = of.gradient(dy, dy_scale, over_rows=True).t() @ of.input(
                rows, scale, over_rows=True
            )
            if bad is not None or bad_x is not None:
                dw.fill_(float("nan"))
            dw = dw.to(weight.dtype)
        of.end_backward()
        return dx, dw, None, None
