"""gae, its adjoint and discounted_returns: kernels and references against loops over sequences.

Every case runs for each implementation there is; between them comparisons are bitwise, because the
order of the operations is part of the definition.
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
    discounted_returns,
    discounted_returns_ref,
    gae,
    gae_backward_ref,
    gae_ref,
)

OPS = ("gae", "gae_backward", "discounted_returns")
NATIVE = all("cpu" in _native.native_devices(op) for op in OPS)
needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled operators are not built")


def native(*arguments: object) -> tuple[Tensor, Tensor]:
    return torch.ops.megarl.gae(*arguments)


def native_returns(*arguments: object) -> Tensor:
    return torch.ops.megarl.discounted_returns(*arguments)


both = pytest.mark.parametrize("op", [pytest.param(native, marks=needs_native), gae_ref])
both_returns = pytest.mark.parametrize(
    "op", [pytest.param(native_returns, marks=needs_native), discounted_returns_ref]
)
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def bits(*rows: Tensor) -> list[list[int]]:
    return [x.contiguous().view(torch.int64).tolist() for x in rows]


def case(num_tokens: int, cuts: list[float], seed: int, dtype=torch.float64) -> Case:
    """rewards, values, mask, cu_seqlens, bootstrap, with NaN values where nothing is trained."""
    generator = torch.Generator().manual_seed(seed)
    inner = sorted(round(c * num_tokens) for c in cuts)
    bounds = torch.tensor([0, *inner, num_tokens])
    rewards, values = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(num_tokens, generator=generator) < 0.6
    bootstrap = torch.randn(len(bounds) - 1, generator=generator, dtype=torch.float64).to(dtype)
    values[~mask] = math.nan
    return rewards, values, mask, bounds, bootstrap


def naive(given: Case, gamma: float, lam: float, credit: bool) -> tuple[np.ndarray, np.ndarray]:
    """From the definitions, each sequence by itself, A_k as a sum of its temporal differences."""
    rewards, values, mask, bounds, bootstrap = (x.numpy() for x in given)
    advantages, returns = np.zeros((2, len(mask)))
    for s, (a, b) in enumerate(pairwise(bounds)):
        at = [t for t in range(a, b) if mask[t]]
        until = dict(zip(at, [*at[1:], b], strict=bool(at)))
        r = [math.fsum(rewards[t : until[t] if credit else t + 1]) for t in at]
        v = [*(float(values[t]) for t in at), float(bootstrap[s])]
        delta = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(at))]
        for k, t in enumerate(at):
            later = delta[k:]
            advantages[t] = math.fsum((gamma * lam) ** j * d for j, d in enumerate(later))
            returns[t] = advantages[t] + v[k]
    return advantages, returns


rows = st.tuples(st.integers(0, 60), st.lists(st.floats(0, 1), max_size=6), st.integers(0, 2**31))
discounts = st.sampled_from([(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 1.0), (0.5, 1.0)])


# --- values ---------------------------------------------------------------------------------------


@both
@settings(max_examples=30, deadline=None)
@given(rows, discounts, st.booleans())
def test_gae_is_the_discounted_sum_of_temporal_differences(op, row, gamma_lam, credit):
    given_case = case(*row)
    found = op(*given_case, *gamma_lam, credit)
    for one, expected in zip(found, naive(given_case, *gamma_lam, credit), strict=True):
        assert one.dtype == torch.float64
        np.testing.assert_allclose(one.numpy(), expected, rtol=1e-12, atol=1e-12)


@needs_native
@settings(max_examples=30, deadline=None)
@given(
    rows,
    discounts,
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_kernels_have_the_bits_of_the_references(row, gamma_lam, credit, one, two, index):
    rewards, values, mask, bounds, bootstrap = case(*row)
    arguments = (rewards.to(one), values.to(two), mask, bounds.to(index), bootstrap.to(one))
    found, expected = (op(*arguments, *gamma_lam, credit) for op in (native, gae_ref))
    assert bits(*found) == bits(*expected)
    arguments = (rewards.to(one), mask, bounds.to(index), gamma_lam[0], credit)
    assert bits(native_returns(*arguments)) == bits(discounted_returns_ref(*arguments))
    arguments = (rewards.double(), rewards.double() + 1, mask, bounds.to(index))
    found, expected = (
        op(*arguments, *gamma_lam, credit)
        for op in (torch.ops.megarl.gae_backward, gae_backward_ref)
    )
    assert bits(*found) == bits(*expected)


@both_returns
@pytest.mark.parametrize("credit", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_are_the_advantages_without_values_where_lam_is_1(op, gamma, credit):
    given_case = case(40, [0.2, 0.2, 0.7], 3)
    rewards, _, mask, bounds, bootstrap = given_case
    zeros = torch.zeros_like(rewards)
    nothing = torch.zeros_like(bootstrap)
    expected, _ = naive((rewards, zeros, mask, bounds, nothing), gamma, 1.0, credit)
    found = op(rewards, mask, bounds, gamma, credit)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


@both
def test_without_discounts_an_advantage_is_the_reward_to_go_minus_the_value(op):
    rewards = torch.tensor([1.0, 2.0, 4.0, 8.0])
    values = torch.tensor([0.5, 0.25, 3.0, 1.0])
    found, returns = op(
        rewards, values, torch.ones(4).bool(), torch.tensor([0, 3, 4]), torch.tensor([16.0, 32.0]),
        1.0, 1.0, True,
    )  # fmt: skip
    assert returns.tolist() == [23, 22, 20, 40]
    assert found.tolist() == [22.5, 21.75, 17, 39]


@both
def test_float32_inputs_are_computed_in_float64(op):
    """2^24 + 1 ones: float32 would stop at 2^24."""
    rewards = torch.ones(101)
    rewards[-1] = 2.0**24
    arguments = (torch.ones(101).bool(), torch.tensor([0, 101]), torch.zeros(1), 1.0, 1.0, True)
    found, _ = op(rewards, torch.zeros(101), *arguments)
    assert found[0].item() == 2.0**24 + 100


@both
def test_rows_without_tokens_sequences_or_trained_tokens(op):
    empty = torch.zeros(0)
    for bounds in ([0], [0, 0, 0]):
        found = op(
            empty, empty, empty.bool(), torch.tensor(bounds), torch.ones(len(bounds) - 1),
            1.0, 1.0, True,
        )  # fmt: skip
        assert [x.shape for x in found] == [(0,), (0,)]
    found, returns = op(
        torch.ones(3), torch.full((3,), math.nan), torch.zeros(3).bool(),
        torch.tensor([0, 1, 1, 3]), torch.ones(3), 1.0, 1.0, True,
    )  # fmt: skip
    assert found.tolist() == returns.tolist() == [0.0] * 3


@both
def test_strided_inputs(op):
    given_case = case(30, [0.4], 5)
    strided = [x.repeat_interleave(2)[::2] for x in given_case]
    assert not strided[0].is_contiguous()
    expected = op(*given_case, 0.9, 0.95, True)
    assert bits(*op(*strided, 0.9, 0.95, True)) == bits(*expected)


# --- what may not change a bit --------------------------------------------------------------------


@both
@pytest.mark.parametrize("credit", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1e308])
def test_what_lies_on_masked_tokens_changes_no_bit(op, credit, garbage):
    rewards, values, mask, bounds, bootstrap = case(50, [0.3, 0.5], 7)
    expected = op(rewards, values, mask, bounds, bootstrap, 0.9, 0.95, credit)
    values = torch.where(mask, values, garbage)
    if not credit:  # with it a reward there is a reward
        rewards = torch.where(mask, rewards, garbage)
    assert bits(*op(rewards, values, mask, bounds, bootstrap, 0.9, 0.95, credit)) == bits(*expected)


@both
def test_a_nan_stays_in_its_sequence(op):
    rewards, values, mask, bounds, bootstrap = case(30, [0.3, 0.6], 8)
    bootstrap[1] = math.nan
    found, _ = op(rewards, values, mask, bounds, bootstrap, 0.9, 0.95, True)
    inside = torch.zeros(30).bool()
    inside[bounds[1] : bounds[2]] = True
    assert torch.equal(found.isnan(), inside & mask)


@needs_native
def test_thread_count_and_packing_change_no_bit():
    given_case = case(200_000, [k / 40 for k in range(1, 40)], 9, torch.float32)
    rewards, values, mask, bounds, bootstrap = given_case
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            found = native(*given_case, 0.99, 0.95, True)
            adjoint = torch.ops.megarl.gae_backward(*found, mask, bounds, 0.99, 0.95, True)
            returns = native_returns(rewards, mask, bounds, 0.99, True)
            results.append(bits(*found, *adjoint, returns))
    finally:
        torch.set_num_threads(before)
    assert results == [results[0]] * 4
    a, b = bounds[7], bounds[8]
    alone = native(
        rewards[a:b], values[a:b], mask[a:b], torch.tensor([0, b - a]), bootstrap[7:8],
        0.99, 0.95, True,
    )  # fmt: skip
    whole = native(*given_case, 0.99, 0.95, True)
    assert bits(*alone) == bits(*(x[a:b] for x in whole))


# --- gradients ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("credit", [False, True])
def test_gradcheck_first_and_second_order(op, credit):
    rewards, values, mask, bounds, bootstrap = case(9, [0.0, 0.4, 0.4], 11)
    inputs = [
        x.nan_to_num().requires_grad_() for x in (rewards, values, bootstrap)
    ]  # gradcheck compares with differences, which NaN has none of

    def curved(r: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        found, returns = op(r.square(), v.exp(), mask, bounds, b.square(), 0.9, 0.8, credit)
        return found.square(), returns.square()  # linear alone has no second derivative

    assert torch.autograd.gradcheck(curved, inputs)
    assert torch.autograd.gradgradcheck(curved, inputs)


@both_returns
@pytest.mark.parametrize("credit", [False, True])
def test_gradcheck_of_returns(op, credit):
    rewards, _, mask, bounds, _ = case(9, [0.0, 0.4, 0.4], 12)

    def curved(r: Tensor) -> Tensor:
        return op(r.square(), mask, bounds, 0.9, credit).square()

    rewards.requires_grad_()
    assert torch.autograd.gradcheck(curved, (rewards,))
    assert torch.autograd.gradgradcheck(curved, (rewards,))


@both
def test_gradients_have_the_dtypes_of_their_inputs_and_are_zero_where_masked(op):
    rewards, values, mask, bounds, bootstrap = case(30, [0.5], 13)
    inputs = [rewards.requires_grad_(), values.float().requires_grad_(), bootstrap.requires_grad_()]
    found, returns = op(inputs[0], inputs[1], mask, bounds, inputs[2], 0.9, 0.95, False)
    (found.sum() + returns.square().sum()).backward()
    assert [x.grad.dtype for x in inputs] == [torch.float64, torch.float32, torch.float64]
    assert (inputs[0].grad[~mask] == 0).all() and (inputs[1].grad[~mask] == 0).all()


@needs_native
def test_opcheck():
    given_case = case(9, [0.3, 0.3], 14)
    inputs = [x.nan_to_num().requires_grad_() if x.is_floating_point() else x for x in given_case]
    torch.library.opcheck(torch.ops.megarl.gae, (*inputs, 0.9, 0.95, True))
    torch.library.opcheck(
        torch.ops.megarl.gae_backward, (inputs[0], inputs[1], *inputs[2:4], 0.9, 0.95, True)
    )
    torch.library.opcheck(
        torch.ops.megarl.discounted_returns, (inputs[0], *inputs[2:4], 0.9, False)
    )


@needs_native
def test_the_public_functions_run_the_kernels(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("the reference ran although the kernel is loaded")

    for name in ("gae_ref", "discounted_returns_ref"):
        monkeypatch.setattr(sys.modules["megarl.ops.gae"], name, refuse)
    rewards, values, mask, bounds, bootstrap = case(9, [0.3], 15)
    gae(rewards, values, mask, bounds, bootstrap, gamma=0.9, lam=0.95)
    discounted_returns(rewards, mask, bounds, gamma=0.9)


@needs_native
def test_compiles_without_a_graph_break():
    given_case = case(9, [0.3], 15)

    def call() -> tuple[Tensor, Tensor]:
        return gae(*given_case, gamma=0.9, lam=0.95)

    explanation = torch._dynamo.explain(call)()
    assert explanation.graph_break_count == 0, explanation.break_reasons


# --- CUDA (run where there is a GPU; see docs/gpu-verification.md) --------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_cuda_kernels_have_the_bits_of_the_references(dtype, index):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the reference would pass the test.
    assert all("cuda" in _native.native_devices(op) for op in OPS), "the CUDA kernels are not built"
    given_case = case(10_003, [0.0, 0.1, 0.1, 0.7], 16, dtype)
    rewards, _, mask, bounds, _ = (x.cuda() for x in given_case)
    on_device = [x.cuda() for x in given_case]
    on_device[3] = bounds.to(index)
    found = native(*on_device, 0.99, 0.95, True)
    expected = gae_ref(*given_case, 0.99, 0.95, True)
    assert bits(*(x.cpu() for x in found)) == bits(*expected)
    adjoint = torch.ops.megarl.gae_backward(*found, mask, on_device[3], 0.99, 0.95, True)
    wanted = gae_backward_ref(*expected, *given_case[2:4], 0.99, 0.95, True)
    assert bits(*(x.cpu() for x in adjoint)) == bits(*wanted)
    returns = native_returns(rewards, mask, on_device[3], 0.99, True)
    wanted_returns = discounted_returns_ref(*given_case[::2][:2], given_case[3], 0.99, True)
    assert bits(returns.cpu()) == bits(wanted_returns)
