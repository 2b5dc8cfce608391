"""What workers do in tests of emulated FP8: single linears, and whole passes with their hooks."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megarl.actor.fp8_emulated import Products
from megarl.actor.names import unwrap
from megarl.ops.fp8_emulation import blockwise
from megarl.types import Sample
from tests.actor.work import config_for, gradients, make_actor, prepare
from tests.actor.work_state import Trainee

Layout = dict[str, int]
MULTIPLIERS = [5.0, 30.0, 1e7]  # of delayed scaling: input, weight, output gradient


def products(
    rank: int, hf: Path, cases: list[dict[str, Any]], tokens: list[int], dtype: torch.dtype
) -> list[list[dict[str, Tensor]]]:
    """By case (of ``precision.fp8``) and number of tokens: one linear's operands and products."""
    found = []
    for case in cases:
        precision = {"dtype": "fp32", "fp8": {"backend": "emulated", **case}}
        actor = make_actor(config_for(hf, precision=precision), {})
        try:
            chunk = unwrap(actor.model[0]).eval()
            layer = chunk.decoder.layers[0]
            if case["recipe"] == "delayed":
                last = torch.tensor([*[[0.0] * 3] * 1024, MULTIPLIERS])
                chunk.fp8_delayed.load("decoder.layers.0.self_attention.linear_qkv", last)
            found.append([_product(layer.self_attention.linear_qkv, n, dtype) for n in tokens])
        finally:
            parallel_state.destroy_model_parallel()
    return found


def _product(linear: Any, tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    n, k = linear.weight.shape
    weight = torch.randn(n, k, generator=generator).to(dtype).requires_grad_()
    x = torch.randn(tokens, 1, k, generator=generator)
    x = (x * torch.exp2(torch.randint(-9, 4, x.shape, generator=generator))).to(dtype)
    x.requires_grad_()
    dy = (torch.randn(tokens, 1, n, generator=generator) * 1e-6).to(dtype)
    y = linear._forward_impl(input=x, weight=weight)
    y.backward(dy)
    assert x.grad is not None and weight.grad is not None
    found = {"x": x.detach(), "weight": weight.detach(), "dy": dy, "y": y.detach()}
    found |= {"dx": x.grad, "dweight": weight.grad}
    return {name: tensor.clone().squeeze(1) for name, tensor in found.items()}


def special_inputs(rank: int, hf: Path) -> dict[str, Any]:
    """A frozen weight, a token whose numbers are not finite, a weight with NaN, no token at all."""
    fp8 = {"backend": "emulated", "recipe": "delayed", "amax_history": 2}
    actor = make_actor(config_for(hf, precision={"dtype": "bf16", "fp8": fp8}), {})
    try:
        chunk = unwrap(actor.model[0])
        linear, state = chunk.decoder.layers[0].self_attention.linear_qkv, chunk.fp8_delayed
        weight = linear.weight.detach().clone()
        forward = linear._forward_impl
        found: dict[str, Any] = {}

        x = torch.ones(3, 1, weight.shape[1], dtype=weight.dtype, requires_grad=True)
        forward(input=x, weight=weight).sum().backward()
        found["frozen"] = weight.grad, x.grad

        bad = x.detach().clone()
        bad[1, 0, 5] = float("nan")
        bad.requires_grad_()
        own = weight.clone().requires_grad_()
        y = forward(input=bad, weight=own)
        y[::2].sum().backward()
        found["nan rows"] = y.detach()[:, 0].isnan(), own.grad
        found["history"] = bool(state._history.isfinite().all())

        own = weight.clone().requires_grad_()
        before = [t.clone() for _, t in state.saved()]
        y = forward(input=x.detach()[:0], weight=own)
        y.sum().backward()
        after = [t for _, t in state.saved()]
        found["no token"] = y.shape, own.grad, all(map(torch.equal, before, after))

        weight[2, 7] = float("nan")
        try:
            forward(input=x.detach(), weight=weight)
        except RuntimeError as e:
            found["weight"] = str(e)
        return found
    finally:
        parallel_state.destroy_model_parallel()


def passes(
    rank: int, hf: Path, layout: Layout, samples: list[Sample], by_hand: bool = False, **own: Any
) -> dict[str, Any]:
    """Old log-probs and gradients of one step; ``by_hand``: of linears that plain autograd
    composes.
    """
    sections: dict[str, Any] = {"algo": {"minibatches": 1}, **own}
    config = config_for(hf, **sections)
    actor = make_actor(config, layout)
    try:
        for module in _emulated(actor.model) if by_hand else ():
            module._forward_impl = _straight_through
        plan = prepare(actor, config, samples)
        actor.forward_backward(plan.steps[0])
        rows = plan.steps[0]
        logprobs = [r.old_logprobs for r in rows if actor.parallel.speaks_for_rows]
        emulated = [m._forward_impl.name for m in _emulated(actor.model)]
        return {"gradients": gradients(actor), "logprobs": logprobs, "emulated": emulated}
    finally:
        parallel_state.destroy_model_parallel()


def _emulated(model: Any) -> list[Any]:
    modules = (m for chunk in model for m in unwrap(chunk).modules())
    return [m for m in modules if isinstance(getattr(m, "_forward_impl", None), Products)]


def _straight_through(input: Tensor, weight: Tensor, bias: Any = None, **_: Any) -> Tensor:
    """blockwise, e4m3, f32 scales. Two products that only gradients flow through, one for each
    operand, and the value of a third: rounding passes gradients on as they are.
    """
    assert bias is None
    x = input.view(-1, input.shape[-1])

    def rounded(t: Tensor, block: tuple[int, int]) -> Tensor:
        return blockwise(t.detach(), block=block, format="e4m3", power_of_two=False)

    w = rounded(weight, (128, 128))
    value = rounded(x, (1, 128)) @ w.t()
    through_x, through_w = x @ w.t(), rounded(x, (128, 1)) @ weight.t()
    if through_x.requires_grad:
        through_x.register_hook(lambda dy: rounded(dy, (1, 128)))
    if through_w.requires_grad:
        through_w.register_hook(lambda dy: rounded(dy, (128, 1)))
    through = through_x + through_w
    return (value + (through - through.detach())).view(*input.shape[:-1], -1)


def steps(rank: int, hf: Path, layout: Layout, until: int, **sections: Any) -> list[dict[str, Any]]:
    """Metrics of every optimizer step, and what delayed scaling knows after it."""
    trainee = Trainee(hf, layout, sections)
    found = []
    try:
        for k in range(until):
            plan = prepare(trainee.actor, trainee.config, random_step(k))
            metrics = trainee.actor.train(plan)
            state = {name: t for chunk in trainee.actor.model for name, t in _saved(chunk)}
            found.append({"metrics": metrics, "fp8": state})
        found[-1] |= {"weights": trainee.weights()}
        return found
    finally:
        parallel_state.destroy_model_parallel()


def random_step(k: int) -> list[Sample]:
    from tests.helpers.samples import random_samples

    return random_samples(4, 4, seed=k)


def _saved(chunk: Any) -> list[tuple[str, Tensor]]:
    state = getattr(unwrap(chunk), "fp8_delayed", None)
    return [] if state is None else [(n, t.clone()) for n, t in state.saved()]
