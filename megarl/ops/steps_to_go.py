"""Process supervision: every token gets the rewards of its own step and of all later ones.

Shapes: T tokens in a row, S sequences packed in it, P reasoning steps. Sequence s has the steps
j in [step_offsets[s], step_offsets[s+1]); step j ends at the token ``step_ends[j]`` of its
sequence, counted from 0, and is worth ``step_rewards[j]`` (arXiv 2402.03300, section 4.1.3)::

    out[t] = sum of step_rewards[j] over the steps of t's sequence that end at t or later

1. Rewards that end at one token are summed in the order of the steps, then tokens from a sequence's
   last to its first, in float64: neither the thread count nor the packing changes a bit, nor does
   the device.
2. Tokens after the last step get 0, and so do sequences without steps. Ends need not be sorted.
3. The gradient of step j is the sum of the gradients of its sequence's tokens up to its end.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megarl.ops._arguments import (
    check_bounds,
    check_cu_seqlens,
    check_device,
    check_dim,
    check_type,
)
from megarl.ops._native import native_devices, runs_native
from megarl.ops._selfcheck import self_check


def steps_to_go(
    step_rewards: Tensor,
    step_ends: Tensor,
    step_offsets: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
) -> Tensor:
    """step_rewards f64 [P], step_ends i64 [P], step_offsets and cu_seqlens i32|i64 [S+1] -> f64
    [T].

    RuntimeError, with the numbers, if `cu_seqlens` or `step_offsets` do not start at 0, decrease,
    or do not end at T and P, or a step does not end in its sequence.
    """
    arguments = (step_rewards, step_ends, step_offsets, cu_seqlens, num_tokens)
    if runs_native("steps_to_go", step_rewards.device):
        out: Tensor = torch.ops.megarl.steps_to_go(*arguments)
        return out
    return steps_to_go_ref(*arguments)


def steps_to_go_ref(
    step_rewards: Tensor,
    step_ends: Tensor,
    step_offsets: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
) -> Tensor:
    """The specification of `steps_to_go`, in plain torch; differentiable by plain autograd."""
    _check_types(step_rewards, step_ends, step_offsets, cu_seqlens, num_tokens)
    check_bounds("steps_to_go", cu_seqlens, num_tokens)
    check_bounds("steps_to_go", step_offsets, len(step_rewards), "step_offsets", "steps")
    sequence = _sequence_of_steps(step_offsets)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1])[sequence]
    outside = ((step_ends < 0) | (step_ends >= lengths)).nonzero()
    if len(outside):
        j = int(outside[0])
        raise RuntimeError(
            f"steps_to_go: step_ends must be in [0, {int(lengths[j])}), the tokens of sequence "
            f"{int(sequence[j])}, got {int(step_ends[j])} at entry {j}"
        )
    ends = cu_seqlens[:-1].long()[sequence] + step_ends
    row = step_rewards.new_zeros(num_tokens).index_add(0, ends, step_rewards)
    parts = [row[a:b].flip(0).cumsum(0).flip(0) for a, b in pairwise(cu_seqlens.tolist())]
    return torch.cat([*parts, row[:0]])


def _sequence_of_steps(step_offsets: Tensor) -> Tensor:
    """i64 [P]"""
    counts = (step_offsets[1:] - step_offsets[:-1]).long()
    return torch.arange(len(counts), device=step_offsets.device).repeat_interleave(counts)


def _check_types(
    step_rewards: Tensor,
    step_ends: Tensor,
    step_offsets: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
) -> None:
    op = "steps_to_go"
    if num_tokens < 0:
        raise RuntimeError(f"{op}: num_tokens must be at least 0, got {num_tokens}")
    check_dim(op, "step_rewards", step_rewards, 1)
    check_type(op, "step_rewards", step_rewards, torch.float64)
    check_dim(op, "step_ends", step_ends, 1)
    if step_ends.numel() != step_rewards.numel():
        raise RuntimeError(
            f"{op}: step_ends must have {step_rewards.numel()} entries, one a step, "
            f"got {step_ends.numel()}"
        )
    check_type(op, "step_ends", step_ends, torch.int64)
    check_device(op, "step_ends", step_ends, step_rewards)
    check_cu_seqlens(op, cu_seqlens, step_rewards)
    check_dim(op, "step_offsets", step_offsets, 1)
    check_type(op, "step_offsets", step_offsets, torch.int32, torch.int64)
    if step_offsets.numel() != cu_seqlens.numel():
        raise RuntimeError(
            f"{op}: step_offsets must have {cu_seqlens.numel()} entries like cu_seqlens, "
            f"got {step_offsets.numel()}"
        )
    check_device(op, "step_offsets", step_offsets, step_rewards)


def _fake(
    step_rewards: Tensor,
    step_ends: Tensor,
    step_offsets: Tensor,
    cu_seqlens: Tensor,
    num_tokens: int,
) -> Tensor:
    _check_types(step_rewards, step_ends, step_offsets, cu_seqlens, num_tokens)
    return step_rewards.new_empty(num_tokens)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, step_ends, step_offsets, cu_seqlens, _ = inputs
    ctx.save_for_backward(step_ends, step_offsets, cu_seqlens)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """[T] -> [P]. Plain torch, so that it can itself be differentiated; sequence by sequence, since
    the difference of two sums over the row would let a NaN out of its sequence.
    """
    step_ends, step_offsets, cu_seqlens = ctx.saved_tensors
    steps, tokens = step_offsets.tolist(), cu_seqlens.tolist()
    parts = [
        grad[first:last].cumsum(0)[step_ends[a:b]]
        for (a, b), (first, last) in zip(pairwise(steps), pairwise(tokens), strict=True)
    ]
    return torch.cat([*parts, grad[:0]]), None, None, None, None


if native_devices("steps_to_go"):
    torch.library.register_fake("megarl::steps_to_go", _fake)
    torch.library.register_autograd(
        "megarl::steps_to_go", _backward, setup_context=_save_for_backward
    )


@self_check("steps_to_go")
def _check(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(300, generator=generator, dtype=torch.float64)
    ends = torch.randint(0, 900, (300,), generator=generator)
    offsets = torch.tensor([0, 0, 100, 300, 300])
    case = (rewards, ends, offsets, torch.tensor([0, 5, 1000, 1900, 2000]))
    found = torch.ops.megarl.steps_to_go(*(x.to(device) for x in case), 2000)
    torch.testing.assert_close(found.cpu(), steps_to_go_ref(*case, 2000), rtol=0, atol=0)
