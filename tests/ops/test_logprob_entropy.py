"""logprob_entropy: kernels and references against float64 numpy; bits where bits are promised."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops import _native, call_counts, logprob_entropy, logprob_entropy_ref
from megarl.ops._selfcheck import run_check
from tests.helpers.logprob_cases import (
    DTYPES,
    INF,
    NAN,
    bits,
    both,
    dtypes,
    eager,
    error,
    expected,
    needs_native,
    random_case,
    run,
)

# --- values and gradients -------------------------------------------------------------------------


@both
def test_two_logits_by_hand(op):
    # p = (3/4, 1/4)
    found = run(
        op,
        torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64),
        torch.tensor([1]),
        torch.tensor([1.0]),
        torch.tensor([0.0]),
        vocab_size=2,
        temperature=1.0,
    )
    assert found["lp"].item() == pytest.approx(math.log(0.25), rel=1e-14)
    h = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert found["entropy"].item() == pytest.approx(h, rel=1e-14)
    assert found["grad"].tolist() == [pytest.approx([-0.75, 0.75], rel=1e-14)]


@both
@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 33, 2048, 2049, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_the_definition(op, dtype, width):
    logits, targets, g, h = random_case(5, width, dtype)
    options: dict[str, Any] = {"vocab_size": width, "temperature": 0.7}
    found = run(op, logits, targets, g, h, **options)
    truth = expected(logits, targets, g, h, width, 0.7)
    atol = 5e-6 if dtype == torch.float32 else 1e-13
    for name, value in truth.items():
        assert found[name].dtype == dtype
        assert error(found[name], value) <= atol, name


@both
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("width", [777, 20_001])
def test_float32_error_is_no_more_than_twice_eagers(op, width, temperature):
    logits, targets, g, h = random_case(16, width, torch.float32, seed=1)
    truth = expected(logits, targets, g, h, width, temperature)
    found = run(op, logits, targets, g, h, vocab_size=width, temperature=temperature)
    base = run(eager, logits, targets, g, h, temperature=temperature)
    for name, value in truth.items():
        assert error(found[name], value) <= 2 * error(base[name], value) + 1e-12, name


@both
def test_bf16_error_is_no_more_than_twice_eagers(op):
    width, temperature = 9999, 0.9
    logits, targets, g, h = random_case(16, width, torch.bfloat16, seed=2)
    truth = expected(logits, targets, g, h, width, temperature)
    found = run(op, logits, targets, g, h, vocab_size=width, temperature=temperature)
    base = run(eager, logits, targets, g, h, temperature=temperature)
    for name, value in truth.items():
        assert error(found[name], value) <= 2 * error(base[name], value) + 1e-12, name
    # The gradient is the true one rounded to bf16, by 2^-8 of it at most, and a little for float32.
    assert found["grad"].dtype == torch.bfloat16
    rounding = np.abs(truth["grad"]) * 2.0**-8
    assert (np.abs(found["grad"].double().numpy() - truth["grad"]) <= 1.01 * rounding + 1e-9).all()


@both
def test_large_logits_lose_nothing_to_their_size(op):
    logits, targets, g, h = random_case(4, 501, torch.float32)
    logits = (logits * 1024).round() / 1024  # so that adding 1000 is exact
    here = run(op, logits, targets, g, h, vocab_size=501, temperature=0.8)
    there = run(op, logits + 1000.0, targets, g, h, vocab_size=501, temperature=0.8)
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=2e-6, atol=2e-6)


@both
@dtypes
def test_logits_that_rise_by_far_along_the_row(op, dtype):
    """A kernel that sums as it goes must put what it has on the larger logit."""
    logits = torch.linspace(-900.0, 100.0, 9001).repeat(3, 1).to(dtype)
    logits[1] = logits[1].flip(0)
    logits[2, 4000] = 1000.0
    targets = torch.tensor([8999, 2, 4000])
    g, h = torch.ones(3), torch.tensor([0.5, -1.0, 2.0])
    truth = expected(logits, targets, g, h, 9001, 1.3)
    found = run(op, logits, targets, g, h, vocab_size=9001, temperature=1.3)
    for name, value in truth.items():
        tolerance = 4e-3 if (dtype, name) == (torch.bfloat16, "grad") else 2e-6
        assert error(found[name], value) <= tolerance, name


@both
def test_gradcheck(op):
    logits, targets, *_ = random_case(3, 21, torch.float64)

    def mixed(x: Tensor) -> Tensor:
        lp, entropy = op(x, targets, vocab_size=19, temperature=0.6)
        return lp.sin() + entropy.square()

    targets = targets % 19
    assert torch.autograd.gradcheck(mixed, (logits.requires_grad_(),))


@both
@dtypes
@pytest.mark.parametrize("missing", ["g", "h"])
def test_a_gradient_that_is_missing_is_one_of_zeros(op, dtype, missing):
    logits, targets, g, h = random_case(4, 300, dtype)
    options: dict[str, Any] = {"vocab_size": 300, "temperature": 1.1}
    given: dict[str, Tensor | None] = {"g": g, "h": h}
    zeros = given | {missing: torch.zeros(4)}
    none = given | {missing: None}
    assert bits(run(op, logits, targets, **none, **options)["grad"]) == bits(
        run(op, logits, targets, **zeros, **options)["grad"]
    )


# --- what is excluded -----------------------------------------------------------------------------


@both
@dtypes
def test_padding_columns_are_not_read_and_have_no_gradient(op, dtype):
    logits, targets, g, h = random_case(5, 120, dtype)
    targets = targets % 101
    options: dict[str, Any] = {"vocab_size": 101, "temperature": 0.7}
    alone = run(op, logits[:, :101].contiguous(), targets, g, h, **options)
    for garbage in (NAN, INF, -INF, 3e38):
        logits[:, 101:] = garbage
        found = run(op, logits, targets, g, h, **options)
        assert bits(found["lp"]) == bits(alone["lp"])
        assert bits(found["entropy"]) == bits(alone["entropy"])
        assert bits(found["grad"][:, :101]) == bits(alone["grad"])
        assert (found["grad"][:, 101:] == 0).all()


@both
@dtypes
def test_rows_without_gradients_are_exact_zeros_even_where_logits_are_not_numbers(op, dtype):
    logits, targets, g, h = random_case(4, 70, dtype)
    logits[1, 3], logits[2] = NAN, INF
    g[1:3] = h[1:3] = 0.0
    found = run(op, logits, targets, g, h, vocab_size=70, temperature=1.0)
    assert (found["grad"][1:3] == 0).all()
    assert found["grad"][[0, 3]].isfinite().all()
    assert found["lp"].isfinite().tolist() == [True, False, False, True]


@both
@dtypes
@pytest.mark.parametrize("at", [0, 31, 69, 2500, 4999])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_logit_that_is_not_finite_shows_in_its_row_alone(op, dtype, at, bad):
    logits, targets, g, h = random_case(3, 5000, dtype)
    clean = run(op, logits, targets, g, h, vocab_size=5000, temperature=1.0)
    logits[1, at] = bad
    found = run(op, logits, targets, g, h, vocab_size=5000, temperature=1.0)
    assert found["lp"][1].isnan()
    assert found["entropy"][1].isnan()
    assert found["grad"][1].isnan().all()
    for name in clean:
        assert bits(found[name][[0, 2]]) == bits(clean[name][[0, 2]])


@both
@dtypes
def test_logits_of_minus_infinity_have_no_probability_and_no_gradient(op, dtype):
    logits, targets, g, h = random_case(3, 4500, dtype)
    logits[0, :4200] = -INF  # more than a block at the start
    logits[1, 7:] = -INF
    logits[2, ::2] = -INF
    targets = torch.tensor([4400, 5, 1])
    truth = expected(logits, targets, g, h, 4500, 0.5)
    found = run(op, logits, targets, g, h, vocab_size=4500, temperature=0.5)
    tolerance = 0.02 if dtype == torch.bfloat16 else 5e-6
    for name, value in truth.items():
        assert error(found[name], value) <= tolerance, name
    assert (found["grad"][logits == -INF] == 0).all()


@both
def test_a_nearly_certain_row(op):
    logits = torch.zeros(1, 4000, dtype=torch.float64)
    logits[0, 1234] = 800.0
    found = run(
        op,
        logits,
        torch.tensor([1234]),
        torch.ones(1),
        torch.ones(1),
        vocab_size=4000,
        temperature=1.0,
    )
    assert found["lp"].item() == 0.0
    assert found["entropy"].item() == 0.0
    assert (found["grad"] == 0).all()


# --- shapes ---------------------------------------------------------------------------------------


@both
@dtypes
def test_no_tokens(op, dtype):
    x = torch.empty(0, 7, dtype=dtype, requires_grad=True)
    lp, entropy = op(x, torch.empty(0, dtype=torch.int64), vocab_size=7, temperature=1.0)
    (lp.sum() + entropy.sum()).backward()
    assert lp.shape == entropy.shape == (0,)
    assert x.grad.shape == (0, 7)


@both
@dtypes
def test_strided_logits_and_targets(op, dtype):
    logits, targets, g, h = random_case(6, 50, dtype)
    options: dict[str, Any] = {"vocab_size": 50, "temperature": 0.7}
    plain = run(op, logits, targets, g, h, **options)
    wide = torch.zeros(6, 61, dtype=dtype)
    wide[:, 3:53] = logits  # rows apart, and not aligned
    turned = logits.t().contiguous()
    apart = torch.stack([targets, targets * 0], 1)[:, 0]
    for make in (lambda: wide[:, 3:53], lambda: turned.t()):
        leaf = make().detach().requires_grad_()
        lp, entropy = op(leaf, apart, **options)
        (lp @ g.to(lp.dtype) + entropy @ h.to(lp.dtype)).backward()
        assert bits(lp.detach()) == bits(plain["lp"])
        assert bits(leaf.grad) == bits(plain["grad"])


# --- native against reference ---------------------------------------------------------------------


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 6), st.integers(1, 5000)),
    padding=st.integers(0, 20),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 0.1, 3.0, 50.0]),
    temperature=st.floats(0.05, 20.0),
    holes=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_native_equals_the_reference(shape, padding, dtype, scale, temperature, holes, seed):
    num_tokens, vocab = shape
    logits, targets, g, h = random_case(num_tokens, vocab + padding, dtype, seed, scale)
    targets = targets % vocab
    if holes:
        logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -INF
        logits.scatter_(1, targets[:, None], 1.0)
    options: dict[str, Any] = {"vocab_size": vocab, "temperature": temperature}
    found = run(logprob_entropy, logits, targets, g, h, **options)
    reference = run(logprob_entropy_ref, logits, targets, g, h, **options)
    exact = dtype == torch.float64
    # Both have the rounding of z = logit / temperature in float32, in proportion to z.
    size = float(logits[logits > -INF].abs().amax()) / temperature if logits.numel() else 0.0
    atol = 1e-11 * (1 + size) if exact else 1e-6 * (3 + size)
    for name in ("lp", "entropy"):
        torch.testing.assert_close(found[name], reference[name], rtol=0, atol=atol)
    rtol = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(
        found["grad"], reference["grad"], rtol=rtol, atol=10 * atol / min(temperature, 1.0)
    )


@needs_native
@dtypes
def test_thread_count_changes_no_bit(dtype):
    logits, targets, g, h = random_case(64, 3000, dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            found = run(logprob_entropy, logits, targets, g, h, vocab_size=2999, temperature=0.7)
            results.append([bits(x) for x in found.values()])
    finally:
        torch.set_num_threads(before)
    assert results[1:] == results[:1] * 3


@needs_native
@dtypes
def test_opcheck(dtype):
    logits, targets, g, h = random_case(4, 37, dtype)
    columns = (10, 45, 0.7)
    stats = torch.ops.megarl.logprob_entropy(logits, targets, *columns)
    torch.library.opcheck(torch.ops.megarl.logprob_entropy, (logits, targets, *columns))
    softmax = torch.stack([stats[0], stats[1], stats[2] / stats[1]])
    torch.library.opcheck(
        torch.ops.megarl.logprob_entropy_backward_,
        (logits, targets, softmax, torch.stack([g, h]), *columns),
    )


@needs_native
def test_the_public_function_runs_the_kernels():
    before = call_counts().get("logprob_entropy", {}).get("native", 0)
    logits, targets, *_ = random_case(2, 5, torch.float32)
    logprob_entropy(logits, targets, vocab_size=5, temperature=1.0)
    assert call_counts()["logprob_entropy"]["native"] == before + 1


@needs_native
def test_the_self_check_passes_on_the_cpu():
    run_check("logprob_entropy", torch.device("cpu"))


# --- CUDA (run where there is a GPU; see docs/gpu-verification.md) --------------------------------


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the reference would pass the tests below.
    assert "cuda" in _native.native_devices("logprob_entropy"), "the CUDA kernel is not built"
    return torch.device("cuda")


@pytest.mark.gpu
def test_cuda_kernels_pass_their_self_check(cuda):
    run_check("logprob_entropy", cuda)


@pytest.mark.gpu
@dtypes
def test_cuda_kernels_equal_the_definition_and_repeat_their_bits(cuda, dtype):
    logits, targets, g, h = random_case(33, 20_011, dtype)
    truth = expected(logits, targets, g, h, 20_011, 0.7)
    on = [x.to(cuda) for x in (logits, targets, g, h)]
    options: dict[str, Any] = {"vocab_size": 20_011, "temperature": 0.7}
    first = {k: v.cpu() for k, v in run(logprob_entropy, *on, **options).items()}
    for name, value in truth.items():
        tolerance = 2e-2 if (dtype, name) == (torch.bfloat16, "grad") else 5e-6
        assert error(first[name], value) <= tolerance, name
    for _ in range(3):
        again = run(logprob_entropy, *on, **options)
        assert all(bits(again[k].cpu()) == bits(first[k]) for k in first)
