"""Moments, whitening, group moments and process supervision: kernels against their references, both
against loops and closed forms. Bitwise between them: the order of the additions is defined.
"""

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops import (
    _native,
    group_moments,
    group_moments_ref,
    masked_moments,
    masked_moments_ref,
    steps_to_go,
    steps_to_go_ref,
    whiten,
    whiten_ref,
)

OPS = ("masked_moments", "whiten", "group_moments", "steps_to_go")
NATIVE = all("cpu" in _native.native_devices(op) for op in OPS)
needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled operators are not built")
NAN = math.nan


def of_both(name: str, reference: object):
    """Parametrises a test over the kernel and the reference of an op."""

    def native(*arguments: object) -> Tensor:
        return getattr(torch.ops.megarl, name)(*arguments)

    return pytest.mark.parametrize("op", [pytest.param(native, marks=needs_native), reference])


both_moments = of_both("masked_moments", masked_moments_ref)
both_whiten = of_both("whiten", whiten_ref)
both_groups = of_both("group_moments", group_moments_ref)
both_steps = of_both("steps_to_go", steps_to_go_ref)


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(-1).view(torch.int64).tolist()


def row(size: int, seed: int, trained: float = 0.6, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    """Values and mask; NaN where not trained."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64) * 2 + 3
    mask = torch.rand(size, generator=generator) < trained
    return torch.where(mask, values, NAN).to(dtype), mask


def two_pass(numbers: list[float]) -> list[float]:
    if not numbers:
        return [0, 0, 0]
    mean = math.fsum(numbers) / len(numbers)
    return [len(numbers), mean, math.fsum((x - mean) ** 2 for x in numbers)]


# --- masked_moments -------------------------------------------------------------------------------

SIZES = [0, 1, 15, 16, 17, 4095, 4096, 4097, 12_289, 33_000]


@both_moments
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_moments_are_those_of_the_trained_numbers(op, size, dtype):
    values, mask = row(size, size, dtype=dtype)
    found = op(values, mask)
    assert (found.dtype, found.shape) == (torch.float64, (3,))
    assert found.tolist() == pytest.approx(two_pass(values[mask].tolist()), rel=1e-12)


@both_moments
@pytest.mark.parametrize("offset", [1e8, -1e12])
def test_a_large_offset_does_not_cancel_the_deviations(op, offset):
    values, mask = row(9000, 1)
    shifted = values + offset
    exact = two_pass((shifted[mask] - offset).tolist())  # exact: the offset is larger by far
    assert op(shifted, mask)[2].item() == pytest.approx(exact[2], rel=1e-15 * abs(offset))


@both_moments
def test_blocks_far_apart_merge_by_their_distance(op):
    """Blocks of constants: all there is, is between them. Some are empty."""
    values = torch.cat([torch.full((4096,), x) for x in (5.0, NAN, NAN, 1.0, 3.0)])
    found = op(values, ~values.isnan())
    assert found.tolist() == [3 * 4096, 3.0, 2 * 4.0 * 4096]


@both_moments
def test_nothing_trained_has_no_moments(op):
    assert op(torch.full((5000,), NAN), torch.zeros(5000).bool()).tolist() == [0, 0, 0]


@needs_native
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20_000), st.integers(0, 2**31), st.sampled_from([0.0, 0.001, 0.5, 1.0]))
def test_the_moments_kernel_has_the_bits_of_the_reference(size, seed, trained):
    for dtype in (torch.float32, torch.float64):
        values, mask = row(size, seed, trained, dtype)
        found = torch.ops.megarl.masked_moments(values, mask)
        assert bits(found) == bits(masked_moments_ref(values, mask))


@both_moments
@pytest.mark.parametrize("garbage", [math.inf, -1e308, 0.0])
def test_what_is_not_trained_changes_no_bit_of_the_moments(op, garbage):
    values, mask = row(5000, 2)
    assert bits(op(torch.where(mask, values, garbage), mask)) == bits(op(values, mask))


@needs_native
def test_thread_count_changes_no_bit():
    values, mask = row(1_000_003, 3, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            white = torch.ops.megarl.whiten(values, mask, 3.0, 4.0, 1e-8)
            results.append((bits(torch.ops.megarl.masked_moments(values, mask)), bits(white)))
    finally:
        torch.set_num_threads(before)
    expected = (
        bits(masked_moments_ref(values, mask)),
        bits(whiten_ref(values, mask, 3.0, 4.0, 1e-8)),
    )
    assert results == [expected] * 4


@both_moments
def test_gradcheck_of_moments(op):
    values, mask = row(7, 4)
    values = values.nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: op(x, mask), (values,))
    assert torch.autograd.gradgradcheck(lambda x: op(x, mask), (values,))
    none = torch.zeros(7).bool()
    assert torch.autograd.grad(op(values, none).sum(), values)[0].tolist() == [0.0] * 7


# --- whiten ---------------------------------------------------------------------------------------


@both_whiten
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whitening_gives_mean_0_and_variance_1_over_the_mask(op, dtype):
    values, mask = row(1001, 5, dtype=dtype)
    n, mean, m2 = two_pass(values[mask].tolist())
    found = op(values, mask, mean, m2 / (n - 1), 0.0)
    assert (found[~mask] == 0).all()
    assert two_pass(found[mask].tolist()) == pytest.approx([n, 0, n - 1], rel=1e-12, abs=1e-12)


@both_whiten
def test_a_variance_of_zero_is_no_error(op):
    """Python would not divide by it."""
    found = op(torch.tensor([1.0, 2.0, NAN]), torch.tensor([1, 1, 0]).bool(), 1.0, 0.0, 0.0)
    assert found[0].isnan() and found[1] == math.inf and found[2] == 0


@needs_native
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**31), st.floats(-10, 10), st.floats(0, 10))
def test_the_whiten_kernel_has_the_bits_of_the_reference(size, seed, mean, variance):
    for dtype in (torch.float32, torch.float64):
        arguments = (*row(size, seed, 0.5, dtype), mean, variance, 1e-8)
        assert bits(torch.ops.megarl.whiten(*arguments)) == bits(whiten_ref(*arguments))


@both_whiten
def test_gradients_of_whiten_stop_at_the_mask(op):
    values, mask = row(9, 6)
    safe = values.nan_to_num().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: op(x.square(), mask, 0.5, 2.0, 1e-8), (safe,))
    values.requires_grad_()
    op(values, mask, 0.5, 3.0, 1.0).sum().backward()
    assert values.grad.tolist() == [0.5 if m else 0.0 for m in mask.tolist()]


# --- group_moments --------------------------------------------------------------------------------

groups = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.floats(-9, 9)), max_size=40)


@needs_native
@settings(max_examples=60, deadline=None)
@given(groups)
def test_group_moments_are_those_of_a_loop(samples):
    group = torch.tensor([g for g, _, _ in samples], dtype=torch.int64)
    counted = torch.tensor([c for _, c, _ in samples], dtype=torch.bool)
    rewards = torch.tensor([r if c else NAN for _, c, r in samples], dtype=torch.float64)
    found = torch.ops.megarl.group_moments(rewards, group, counted, 7)
    assert bits(found) == bits(group_moments_ref(rewards, group, counted, 7))
    for k in range(7):
        own = [r for g, c, r in samples if c and g == k]
        ends = [min(own), max(own)] if own else [math.inf, -math.inf]
        assert found[:3, k].tolist() == pytest.approx(two_pass(own), rel=1e-12, abs=1e-12)
        assert found[3:, k].tolist() == ends


@both_groups
def test_a_group_of_equal_rewards_is_flat_by_its_ends(op):
    found = op(torch.full((7,), 0.1).double(), torch.zeros(7).long(), torch.ones(7).bool(), 1)
    assert found[3, 0] == found[4, 0]


@both_groups
def test_no_samples_and_no_groups(op):
    nothing = (torch.zeros(0).double(), torch.zeros(0).long(), torch.zeros(0).bool())
    assert op(*nothing, 0).shape == (5, 0)
    assert op(*nothing, 1).squeeze(1).tolist() == [0, 0, 0, math.inf, -math.inf]


# --- steps_to_go ----------------------------------------------------------------------------------

sequences = st.lists(
    st.tuples(st.integers(0, 12), st.lists(st.tuples(st.floats(0, 1), st.floats(-9, 9)))),
    max_size=6,
)


def steps_of(samples) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Of (length, [(where it ends, from 0 to 1, reward)]); a sequence without tokens has none."""
    kept = [(length, steps if length else []) for length, steps in samples]
    ends = [min(int(e * length), length - 1) for length, steps in kept for e, _ in steps]
    rewards = [r for _, steps in kept for _, r in steps]
    return (
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(ends, dtype=torch.int64),
        torch.tensor([0, *(len(steps) for _, steps in kept)]).cumsum(0),
        torch.tensor([0, *(length for length, _ in kept)]).cumsum(0),
        sum(length for length, _ in kept),
    )


@needs_native
@settings(max_examples=60, deadline=None)
@given(sequences, st.sampled_from([torch.int32, torch.int64]))
def test_a_token_gets_the_rewards_of_its_own_and_all_later_steps(samples, index):
    rewards, ends, offsets, cu_seqlens, num_tokens = steps_of(samples)
    arguments = (rewards, ends, offsets.to(index), cu_seqlens.to(index), num_tokens)
    found = torch.ops.megarl.steps_to_go(*arguments)
    assert bits(found) == bits(steps_to_go_ref(*arguments))
    expected = []
    for (a, b), (i, j) in zip(
        pairwise(cu_seqlens.tolist()), pairwise(offsets.tolist()), strict=True
    ):
        steps = list(zip(ends[i:j].tolist(), rewards[i:j].tolist(), strict=True))
        expected += [math.fsum(r for e, r in steps if e >= t) for t in range(b - a)]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


@both_steps
def test_tokens_after_the_last_step_and_sequences_without_steps_get_exactly_zero(op):
    found = op(
        torch.tensor([0.1, 0.2, NAN], dtype=torch.float64), torch.tensor([1, 1, 0]),
        torch.tensor([0, 2, 2, 3]), torch.tensor([0, 4, 6, 8], dtype=torch.int32), 8,
    )  # fmt: skip
    assert found[:6].tolist() == [0.1 + 0.2, 0.1 + 0.2, 0, 0, 0, 0]
    assert found[6].isnan() and found[7] == 0  # a NaN stays in its sequence


@both_steps
def test_gradcheck_of_steps_to_go(op):
    rewards, *rest = steps_of([(5, [(0.9, 1.0), (0.1, 2.0)]), (0, []), (3, [(0.5, -1.0)]), (2, [])])
    rewards.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: op(x.square(), *rest).square(), (rewards,))
    assert torch.autograd.gradgradcheck(lambda x: op(x.square(), *rest).square(), (rewards,))


# --- all of them ----------------------------------------------------------------------------------


@needs_native
def test_opcheck():
    values, mask = row(9, 7)
    values = values.nan_to_num().requires_grad_()
    torch.library.opcheck(torch.ops.megarl.masked_moments, (values, mask))
    torch.library.opcheck(torch.ops.megarl.whiten, (values, mask, 1.0, 2.0, 1e-8))
    group = torch.zeros(9).long()
    torch.library.opcheck(torch.ops.megarl.group_moments, (values.detach(), group, mask, 2))
    rewards, *rest = steps_of([(5, [(0.9, 1.0), (0.1, 2.0)]), (3, [])])
    torch.library.opcheck(torch.ops.megarl.steps_to_go, (rewards.requires_grad_(), *rest))


@needs_native
def test_the_public_functions_run_the_kernels(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran although the kernel is loaded")

    modules = ("moments", "moments", "group_moments", "steps_to_go")
    for module, name in zip(modules, OPS, strict=True):
        monkeypatch.setattr(sys.modules[f"megarl.ops.{module}"], f"{name}_ref", refuse)
    values, mask = row(9, 8)
    masked_moments(values, mask)
    whiten(values, mask, mean=0.0, variance=1.0, eps=0.0)
    group_moments(values, torch.zeros(9).long(), mask, 1)
    steps_to_go(*steps_of([(5, [(0.9, 1.0)])]))


@needs_native
def test_strided_inputs():
    values, mask = (x.repeat_interleave(2)[::2] for x in row(5000, 9))
    group = torch.zeros(5000, 2).long()[:, 0]
    ops = torch.ops.megarl
    dense = values.contiguous(), mask.contiguous()
    assert bits(ops.masked_moments(values, mask)) == bits(ops.masked_moments(*dense))
    assert bits(ops.whiten(values, mask, 1.0, 2.0, 0.0)) == bits(ops.whiten(*dense, 1.0, 2.0, 0.0))
    assert bits(ops.group_moments(values, group, mask, 1)) == bits(
        ops.group_moments(dense[0], group.contiguous(), dense[1], 1)
    )


ROW, MASK, GROUP = torch.ones(4), torch.ones(4).bool(), torch.zeros(4).long()
OFFSETS, BOUNDS = torch.tensor([0, 1, 4]), torch.tensor([0, 3, 6])
STEPS = (ROW.double(), GROUP, OFFSETS, BOUNDS, 6)


def changed(at: int, value: object) -> tuple[object, ...]:
    return *STEPS[:at], value, *STEPS[at + 1 :]


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("masked_moments", (ROW.half(), MASK), "values must be float32 or float64"),
        ("masked_moments", (ROW, MASK[:3]), "mask must have 4 tokens like the others, got 3"),
        ("masked_moments", (ROW, ROW), "mask must be bool, got (Float|torch.float32)"),
        ("masked_moments", (ROW[None], MASK), "values must have 1 dimension.s., got 2"),
        ("whiten", (ROW, MASK, 0.0, -1.0, 0.0), "variance must be at least 0, got -1"),
        ("whiten", (ROW, MASK, 0.0, 1.0, -0.5), "eps must be at least 0, got -0.5"),
        ("whiten", (ROW.long(), MASK, 0.0, 1.0, 0.0), "values must be float32 or float64"),
        ("group_moments", (ROW, GROUP, MASK, 1), "rewards must be float64, got"),
        ("group_moments", (ROW.double(), GROUP.int(), MASK, 1), "group must be int64, got"),
        ("group_moments", (ROW.double(), GROUP, MASK[:2], 1), "must have 4 tokens"),
        ("group_moments", (ROW.double(), GROUP, MASK, -1), "num_groups must be at least 0, got -1"),
        ("group_moments", (ROW.double(), GROUP, MASK, 0), r"in \[0, 0\), got 0 at entry 0"),
        ("group_moments", (ROW.double(), GROUP - 1, MASK, 2), r"in \[0, 2\), got -1 at entry 0"),
        ("steps_to_go", changed(0, ROW), "step_rewards must be float64, got"),
        ("steps_to_go", changed(1, GROUP[:3]), "step_ends must have 4 entries, one a step, got 3"),
        ("steps_to_go", changed(1, GROUP.int()), "step_ends must be int64, got"),
        ("steps_to_go", changed(1, GROUP + 3), r"in \[0, 3\), .* sequence 0, got 3 at entry 0"),
        ("steps_to_go", changed(1, GROUP - 1), r"in \[0, 3\), .* sequence 0, got -1 at entry 0"),
        ("steps_to_go", changed(2, OFFSETS[:2]), "must have 3 entries like cu_seqlens, got 2"),
        ("steps_to_go", changed(2, OFFSETS + 1), "step_offsets must start at 0, got 1"),
        ("steps_to_go", changed(2, OFFSETS * 2), "step_offsets must end at the 4 steps, got 8"),
        ("steps_to_go", changed(3, BOUNDS * 2), "cu_seqlens must end at the 6 tokens, got 12"),
        ("steps_to_go", changed(3, torch.tensor([0, 7, 6])), "must not decrease, got 7 then 6"),
        ("steps_to_go", changed(4, -1), "num_tokens must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_found(native, name, arguments, message):
    op = getattr(torch.ops.megarl, name) if native else globals()[f"{name}_ref"]
    with pytest.raises(RuntimeError, match=f"{name}: .*{message}"):
        op(*arguments)


# --- CUDA (run where there is a GPU; see docs/gpu-verification.md) --------------------------------


@pytest.mark.gpu
def test_cuda_kernels_equal_the_references_and_repeat_their_bits():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the reference would pass the test.
    assert all("cuda" in _native.native_devices(op) for op in OPS), "the CUDA kernels are not built"
    values, mask = row(100_003, 10)
    group = torch.arange(100_003) % 50
    moments = masked_moments(values.cuda(), mask.cuda())
    # Other orders of the same float64 additions.
    torch.testing.assert_close(moments.cpu(), masked_moments_ref(values, mask), rtol=1e-11, atol=0)
    found = group_moments(values.cuda(), group.cuda(), mask.cuda(), 51)
    expected = group_moments_ref(values, group, mask, 51)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-11, atol=1e-11)
    for _ in range(5):
        assert bits(masked_moments(values.cuda(), mask.cuda()).cpu()) == bits(moments.cpu())
        again = group_moments(values.cuda(), group.cuda(), mask.cuda(), 51)
        assert bits(again.cpu()) == bits(found.cpu())
    white = whiten(values.cuda(), mask.cuda(), mean=3.0, variance=4.0, eps=1e-8)
    assert bits(white.cpu()) == bits(whiten_ref(values, mask, 3.0, 4.0, 1e-8))
    steps = steps_of([(900, [(k / 99, k - 50.0) for k in range(99)]), (0, []), (70, [(0.5, 2.0)])])
    on_device = [x.cuda() for x in steps[:4]]
    assert bits(steps_to_go(*on_device, steps[4]).cpu()) == bits(steps_to_go_ref(*steps))
