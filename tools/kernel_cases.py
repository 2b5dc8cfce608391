"""Every kernel at a realistic size: what is called, what it is compared with, which bytes it moves.

For tools/verify_gpu.py, on a machine that has torch and nothing else: only torch and megarl.ops are
imported. Inputs are drawn on the CPU: they are the same on every machine.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl import ops

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kernel_policy import eager_ppo_clip, eager_sums, loss_and_gradient, sums

Function = Callable[..., Any]


@dataclass(frozen=True)
class Size:
    """``tokens`` of the packed row, ``side`` of a matrix, ``columns`` of a vocabulary."""

    tokens: int
    side: int
    columns: int


# Larger than a GPU's caches.
REALISTIC = Size(tokens=1 << 22, side=8192, columns=151_936)
SMALL = Size(tokens=20_000, side=300, columns=3000)


@dataclass(frozen=True)
class Case:
    """``native(*args)`` is ``reference(*args)`` within ``rtol`` and ``atol`` (0: bit for bit), and
    that is known for certain of the reference on the CPU: on a GPU torch adds in an order of its
    own. ``rival``: what is timed on the device, where it is not the reference. ``num_bytes``: what
    has to be read and written.
    """

    size: str
    native: Function
    reference: Function
    args: tuple[Any, ...]
    num_bytes: int
    rtol: float = 0.0
    atol: float = 0.0
    rival: Function | None = None

    def on(self, device: torch.device) -> tuple[Any, ...]:
        """The arguments, there."""
        return tuple(x.to(device) if isinstance(x, Tensor) else x for x in self.args)


@dataclass(frozen=True)
class Row:
    """A packed row; 70 % of its tokens are trained. ``shape``: in words."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    bootstrap: Tensor

    @property
    def shape(self) -> str:
        longest = max(b - a for a, b in pairwise(self.cu_seqlens.tolist()))
        count = len(self.cu_seqlens) - 1
        return f"{len(self.mask)} tokens in {count} sequences, the longest {longest}"


def packed_row(size: Size) -> Row:
    generator = torch.Generator().manual_seed(1)
    lengths = ragged(size.tokens)
    rewards, values = torch.randn(2, size.tokens, generator=generator)
    return Row(
        rewards,
        values,
        torch.rand(size.tokens, generator=generator) < 0.7,
        torch.tensor([0, *lengths]).cumsum(0).int(),
        torch.randn(len(lengths), generator=generator),
    )


def ragged(num_tokens: int) -> list[int]:
    """Response lengths, log-normal between 64 and 16,384 tokens, that sum to ``num_tokens``."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    left = num_tokens
    while left > 0:
        draw = math.exp(float(torch.randn((), generator=generator)) + math.log(2700))
        lengths.append(min(max(int(draw), 64), 16_384, left))
        left -= lengths[-1]
    return lengths


def nbytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


# --- one function an op ---------------------------------------------------------------------------


def delta_encode_(size: Size) -> Case:
    base, new = _two_versions(size)
    return Case(
        f"{list(base.shape)} bf16, 5 % changed, with the copy that keeps the base",
        _on_a_copy(torch.ops.megarl.delta_encode_),
        _on_a_copy(ops.delta_encode_ref_),
        (base, new),
        5 * nbytes(base),
    )


def delta_apply_(size: Size) -> Case:
    base, new = _two_versions(size)
    payload = ops.delta_encode_(base.clone(), new)
    return Case(
        f"{list(base.shape)} bf16, 5 % changed, with the copy that keeps the base",
        _on_a_copy(torch.ops.megarl.delta_apply_),
        _on_a_copy(ops.delta_apply_ref_),
        (base, payload),
        4 * nbytes(base) + nbytes(payload),
    )


def digest_partial(size: Size) -> Case:
    x = _matrix(size, torch.bfloat16)
    native = torch.ops.megarl.digest_partial
    args = (x, list(x.shape), [0, 0])
    return Case(f"{list(x.shape)} bf16", native, ops.digest_partial_ref, args, nbytes(x))


def fp8_block_quant(size: Size) -> Case:
    x = _matrix(size, torch.bfloat16)
    return Case(
        f"{list(x.shape)} bf16, blocks of 128 x 128",
        torch.ops.megarl.fp8_block_quant,
        ops.fp8_block_quant_ref,
        (x, 128, 128, 1e-10, False),
        nbytes(x) + x.numel(),
    )


def fp8_block_dequant(size: Size) -> Case:
    codes, scales = ops.fp8_block_quant_ref(_matrix(size, torch.float32), 128, 128, 1e-10, False)
    return Case(
        f"{list(codes.shape)} to bf16, blocks of 128 x 128",
        torch.ops.megarl.fp8_block_dequant,
        ops.fp8_block_dequant_ref,
        (codes, scales, 128, 128, torch.bfloat16),
        3 * codes.numel(),
    )


def gae(size: Size) -> Case:
    row = packed_row(size)
    args = (row.rewards, row.values, row.mask, row.cu_seqlens, row.bootstrap)
    return Case(
        row.shape,
        torch.ops.megarl.gae,
        ops.gae_ref,
        (*args, 0.99, 0.95, True),
        nbytes(*args) + 16 * size.tokens,
    )


def gae_backward(size: Size) -> Case:
    row = packed_row(size)
    args = (row.rewards.double(), row.values.double(), row.mask, row.cu_seqlens)
    return Case(
        row.shape,
        torch.ops.megarl.gae_backward,
        ops.gae_backward_ref,
        (*args, 0.99, 0.95, True),
        nbytes(*args) + 16 * size.tokens,
    )


def discounted_returns(size: Size) -> Case:
    row = packed_row(size)
    args = (row.rewards, row.mask, row.cu_seqlens)
    return Case(
        row.shape,
        torch.ops.megarl.discounted_returns,
        ops.discounted_returns_ref,
        (*args, 0.99, True),
        nbytes(*args) + 8 * size.tokens,
    )


def masked_moments(size: Size) -> Case:
    row = packed_row(size)
    args = (row.values, row.mask)
    native = torch.ops.megarl.masked_moments
    # Float64 sums in another order.
    return Case(row.shape, native, ops.masked_moments_ref, args, nbytes(*args), 1e-11, 1e-12)


def whiten(size: Size) -> Case:
    row = packed_row(size)
    args = (row.values, row.mask, 0.5, 2.0, 1e-8)
    num_bytes = nbytes(row.values, row.mask) + 8 * size.tokens
    return Case(row.shape, torch.ops.megarl.whiten, ops.whiten_ref, args, num_bytes)


def group_moments(size: Size) -> Case:
    generator = torch.Generator().manual_seed(2)
    count, groups = size.tokens // 8, size.tokens // 128  # samples, 16 a group
    rewards = torch.randn(count, generator=generator, dtype=torch.float64)
    group = torch.randint(0, groups, (count,), generator=generator)
    counted = torch.rand(count, generator=generator) < 0.95
    return Case(
        f"{count} samples in {groups} groups",
        torch.ops.megarl.group_moments,
        ops.group_moments_ref,
        (rewards, group, counted, groups),
        nbytes(rewards, group, counted) + 40 * groups,
        rtol=1e-11,
        atol=1e-11,
    )


def steps_to_go(size: Size) -> Case:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor(ragged(size.tokens))
    ends = (torch.rand(len(lengths), 8, generator=generator) * lengths[:, None]).long()
    rewards = torch.randn(ends.numel(), generator=generator, dtype=torch.float64)
    offsets = torch.arange(len(lengths) + 1) * 8
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    args = (rewards, ends.reshape(-1), offsets, bounds)
    return Case(
        f"{size.tokens} tokens, 8 steps in each of {len(lengths)} sequences",
        torch.ops.megarl.steps_to_go,
        ops.steps_to_go_ref,
        (*args, size.tokens),
        nbytes(*args) + 8 * size.tokens,
    )


def segment_sum(size: Size) -> Case:
    row = packed_row(size)
    args = (row.values, row.cu_seqlens)
    native = torch.ops.megarl.segment_sum
    return Case(row.shape, native, ops.segment_sum_ref, args, nbytes(*args), 1e-11, 1e-9)


def policy_loss_case(size: Size) -> Case:
    """Compared with the CPU's kernel, whose reference is in ``algos/``; timed against the same
    objective in eager torch, with the metrics that trainers usually have.
    """
    args = _policy(size)
    return Case(
        f"{packed_row(size).shape}; ppo_clip with k3",
        loss_and_gradient,
        loss_and_gradient,
        args,
        nbytes(*args) + 4 * size.tokens,
        rtol=2e-6,
        atol=1e-9,
        rival=eager_ppo_clip,
    )


def policy_sums_case(size: Size) -> Case:
    args = _policy(size)
    return Case(
        packed_row(size).shape,
        sums,
        sums,
        args,
        nbytes(*args),
        rtol=1e-9,
        atol=1e-9,
        rival=eager_sums,
    )


def logprob_entropy(size: Size) -> Case:
    face = import_module("megarl.ops.logprob_entropy")
    args = (*_logits(size), 0, size.columns, 1.0)

    def without_shift(function: Function) -> Function:
        """log of the sum, and the target's logit: two implementations may shift differently."""

        def call(*args: Any) -> Tensor:
            stats = function(*args)
            return torch.stack([stats[0] + stats[1].log(), stats[3]])

        return call

    return Case(
        f"{list(args[0].shape)} bf16",
        without_shift(torch.ops.megarl.logprob_entropy),
        without_shift(face.stats_ref),
        args,
        nbytes(args[0]),
        rtol=1e-6,
        atol=2e-6,
    )


def logprob_entropy_backward_(size: Size) -> Case:
    face = import_module("megarl.ops.logprob_entropy")
    logits, targets = _logits(size)
    stats = torch.ops.megarl.logprob_entropy(logits, targets, 0, size.columns, 1.0)
    softmax = torch.stack([stats[0], stats[1], stats[2] / stats[1]])
    grads = torch.ones(2, logits.shape[0], dtype=torch.float64)

    return Case(
        f"{list(logits.shape)} bf16, with the copy that keeps the logits",
        _on_a_copy(torch.ops.megarl.logprob_entropy_backward_),
        _on_a_copy(face.backward_ref_),
        (logits, targets, softmax, grads, 0, size.columns, 1.0),
        4 * nbytes(logits),
        rtol=2**-7,  # one step of bf16
        atol=1e-6,
    )


CASES: dict[str, Callable[[Size], Case]] = {
    "delta_apply_": delta_apply_,
    "delta_encode_": delta_encode_,
    "digest_partial": digest_partial,
    "discounted_returns": discounted_returns,
    "fp8_block_dequant": fp8_block_dequant,
    "fp8_block_quant": fp8_block_quant,
    "gae": gae,
    "gae_backward": gae_backward,
    "group_moments": group_moments,
    "logprob_entropy": logprob_entropy,
    "logprob_entropy_backward_": logprob_entropy_backward_,
    "masked_moments": masked_moments,
    "policy_loss": policy_loss_case,
    "policy_sums": policy_sums_case,
    "segment_sum": segment_sum,
    "steps_to_go": steps_to_go,
    "whiten": whiten,
}


# --- parts of them --------------------------------------------------------------------------------


def _policy(size: Size) -> tuple[Tensor, ...]:
    """In the order of ``kernel_policy.py``."""
    row = packed_row(size)
    generator = torch.Generator().manual_seed(4)
    old = -torch.randn(size.tokens, generator=generator).abs()
    gaps = torch.randn(2, size.tokens, generator=generator) * 0.1
    weight = torch.full((size.tokens,), 1 / size.tokens)
    return old + gaps[0], old, row.rewards, weight, row.mask, row.cu_seqlens, old + gaps[1]


def _on_a_copy(function: Function) -> Function:
    """Of the first argument, to which it writes: the copy, and what is returned beside it."""

    def call(written: Tensor, *rest: Any) -> Any:
        room = written.clone()
        result = function(room, *rest)
        return room if result is None else (room, result)

    return call


def _matrix(size: Size, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    # Columns that no block divides.
    return torch.randn(size.side, size.side + 56, generator=generator).to(dtype)


def _two_versions(size: Size) -> tuple[Tensor, Tensor]:
    base = _matrix(size, torch.bfloat16)
    changed = torch.rand(base.shape, generator=torch.Generator().manual_seed(7)) < 0.05
    return base, (base.view(torch.int16) + changed).to(torch.int16).view(torch.bfloat16)


def _logits(size: Size) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    num_tokens = max(size.tokens // 8192, 1)
    logits = torch.randn(num_tokens, size.columns, generator=generator) * 4
    return logits.bfloat16(), torch.randint(0, size.columns, (num_tokens,), generator=generator)
