"""fp8_block_quant and fp8_block_dequant: against numpy on tables of the 256 codes' values, in every
implementation there is. Comparisons are of bits.
"""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops import (
    _native,
    fp8_block_dequant,
    fp8_block_dequant_ref,
    fp8_block_quant,
    fp8_block_quant_ref,
)

E4M3 = torch.float8_e4m3fn
NATIVE = "cpu" in _native.native_devices("fp8_block_quant")
needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled operators are not built")


def native_quant(
    x: Tensor, n: int = 128, k: int = 128, eps: float = 1e-10, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    return torch.ops.megarl.fp8_block_quant(x, n, k, eps, power_of_two)


def quant_ref(
    x: Tensor, n: int = 128, k: int = 128, eps: float = 1e-10, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    return fp8_block_quant_ref(x, n, k, eps, power_of_two)


def native_dequant(*args: Any) -> Tensor:
    return torch.ops.megarl.fp8_block_dequant(*args)


both_quants = pytest.mark.parametrize(
    "quant", [pytest.param(native_quant, marks=needs_native), quant_ref]
)
both_dequants = pytest.mark.parametrize(
    "dequant", [pytest.param(native_dequant, marks=needs_native), fp8_block_dequant_ref]
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    kind = kinds[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


# --- an independent implementation ----------------------------------------------------------------


def code_value(code: int) -> float:
    """e4m3fn by its definition: bias 7, denormals of 2^-9, no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


VALUES = np.array([code_value(code) for code in range(0x7F)])  # 0 to 448, rising


def nearest_code(x: np.ndarray) -> np.ndarray:
    """Of float32, by distance to the table's values in float64; a tie goes to the even code."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448.0)
    above = np.minimum(np.searchsorted(VALUES, magnitude), 126)
    below = np.maximum(above - 1, 0)
    up, down = VALUES[above] - magnitude, magnitude - VALUES[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def plain_quant(
    x: np.ndarray, block_n: int, block_k: int, eps: float, power_of_two: bool
) -> tuple[np.ndarray, np.ndarray]:
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-x.shape[0] // block_n), -(-x.shape[1] // block_k)), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = np.s_[i * block_n : (i + 1) * block_n, j * block_k : (j + 1) * block_k]
        scale = np.maximum(np.abs(x[at]).max(), np.float32(eps)) / np.float32(448)
        if power_of_two:
            mantissa, exponent = np.frexp(scale)
            scale = np.float32(np.ldexp(1.0, exponent - (mantissa == 0.5))) if scale else scale
        if scale < np.finfo(np.float32).smallest_normal:
            scale = np.float32(1)
        scales[i, j] = scale
        codes[at] = nearest_code(x[at] * (np.float32(1) / scale))
    return codes, scales


def some(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Magnitudes over many powers of two, so that denormal codes, zeros and ties occur."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator)
    x *= torch.exp2(torch.randint(-14, 4, (n, k), generator=generator))
    return x.to(dtype)


# --- quantising -----------------------------------------------------------------------------------


@both_quants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((256, 384), (128, 128)),
        ((130, 257), (128, 128)),
        ((5, 3), (128, 128)),
        ((7, 300), (1, 128)),
        ((33, 17), (4, 5)),
        ((3, 4), (1, 1)),
    ],
)
def test_codes_and_scales_are_those_of_the_definition(quant, dtype, power_of_two, shape, block):
    x = some(*shape, dtype)
    codes, scales = quant(x, *block, 1e-10, power_of_two)
    expected, expected_scales = plain_quant(x.float().numpy(), *block, 1e-10, power_of_two)
    assert codes.dtype == E4M3 and codes.shape == x.shape
    np.testing.assert_array_equal(scales.numpy(), expected_scales)
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy(), expected)


@both_quants
def test_every_value_between_codes_rounds_to_nearest_even(quant):
    """The scale is 1: a block's largest magnitude is 448."""
    halves = (VALUES[1:] + VALUES[:-1]) / 2
    halves32 = halves.astype(np.float32)
    points = [VALUES, halves, np.nextafter(halves32, np.float32(0))]
    points += [np.nextafter(halves32, np.float32(999)), [1e-30, 2.0**-10, 2.0**-149]]
    row = np.concatenate(points).astype(np.float32)
    row = np.concatenate([row, -row])
    x = torch.from_numpy(row)[None]
    codes, scales = quant(x, 1, x.shape[1], 0.0)
    assert scales.tolist() == [[1.0]]
    np.testing.assert_array_equal(codes.view(torch.uint8).numpy()[0], nearest_code(row))
    assert same_bits(codes, x.to(E4M3))  # torch's cast agrees
    assert codes.view(torch.uint8)[0, :127].tolist() == list(range(127))


@both_quants
def test_every_bfloat16_is_quantised_as_its_float32(quant):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite()].view(-1, 255)
    for power_of_two in (False, True):
        narrow = quant(x, 1, 128, 1e-10, power_of_two)
        wide = quant(x.float(), 1, 128, 1e-10, power_of_two)
        assert all(same_bits(a, b) for a, b in zip(narrow, wide, strict=True))


@needs_native
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.tuples(st.integers(1, 50), st.integers(1, 50)),
    st.sampled_from([0.0, 1e-10, 1e-4, 3.0]),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.integers(-140, 100),
    st.integers(0, 2**20),
)
def test_kernel_and_reference_agree(n, k, block, eps, power_of_two, dtype, exponent, seed):
    x = (some(n, k, torch.float32, seed).double() * 2.0**exponent).to(dtype)
    x[:, k // 2 : k // 2 + 3] = 0
    codes, scales = native_quant(x, *block, eps, power_of_two)
    expected, expected_scales = quant_ref(x, *block, eps, power_of_two)
    assert same_bits(scales, expected_scales)
    assert same_bits(codes, expected)
    for scale, out in ((scales, torch.float32), (scales.bfloat16(), torch.bfloat16)):
        y = native_dequant(codes, scale, *block, out)
        assert same_bits(y, fp8_block_dequant_ref(codes, scale, *block, out))


@both_quants
def test_power_of_two_scales_round_up(quant):
    amax = torch.tensor([448.0, 448.1, 895.9, 896.0, 897.0, 224.0, 3.5])[:, None]
    _, scales = quant(amax, 1, 1, 0.0, True)
    assert scales.flatten().tolist() == [1, 2, 2, 2, 4, 0.5, 2.0**-7]


@both_quants
def test_blocks_of_zeros_have_the_scale_of_eps_or_one(quant):
    zeros = torch.zeros(2, 2)
    zeros[0, 1] = -0.0
    for eps, power_of_two, expected in (
        (448.0, False, 1.0),
        (1e-4, False, float(np.float32(1e-4) / np.float32(448))),
        (1e-4, True, 2.0**-22),
        (0.0, False, 1.0),
        (0.0, True, 1.0),
    ):
        codes, scales = quant(zeros, 128, 128, eps, power_of_two)
        assert scales.tolist() == [[expected]]
        assert codes.view(torch.uint8).tolist() == [[0, 0x80], [0, 0]]


@both_quants
def test_a_block_below_the_normal_numbers_has_scale_one(quant):
    codes, scales = quant(torch.tensor([[1e-40, -5e-36, 0.0]]), 1, 128, 0.0)
    assert scales.tolist() == [[1.0]]
    assert codes.view(torch.uint8).tolist() == [[0, 0x80, 0]]


@both_quants
def test_the_largest_finite_number_has_a_finite_scale(quant):
    largest = torch.finfo(torch.float32).max
    codes, scales = quant(torch.tensor([[largest, -largest, 1.0]]), 1, 128, 1e-10, True)
    assert scales.isfinite().all()
    assert codes.float().tolist() == [[256.0, -256.0, 0.0]]


@both_quants
def test_empty_and_strided_input(quant):
    for shape in ((0, 5), (5, 0), (0, 0)):
        codes, scales = quant(torch.zeros(shape), 2, 2)
        assert codes.shape == shape and scales.shape == ((shape[0] + 1) // 2, (shape[1] + 1) // 2)
    x = some(40, 60, torch.bfloat16)
    for view in (x.t(), x[::3, 1::2]):
        pairs = zip(quant(view, 8, 8), quant(view.contiguous(), 8, 8), strict=True)
        assert all(same_bits(a, b) for a, b in pairs)


@both_quants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_finite_is_refused_with_count_and_place(quant, dtype):
    x = some(200, 300, dtype)
    x[150, 7] = float("nan")
    with pytest.raises(RuntimeError, match=r"got 1 value.s. .* the first nan at \[150, 7\]"):
        quant(x)
    x[3, 299] = float("-inf")
    x[199, 299] = float("inf")
    with pytest.raises(RuntimeError, match=r"got 3 value.s. .* the first -inf at \[3, 299\]"):
        quant(x)


@both_quants
@pytest.mark.parametrize(
    ("x", "block", "eps", "message"),
    [
        (torch.zeros(3), (1, 1), 0.0, "x must have 2 dimension.s., got 1"),
        (torch.zeros(2, 3, 4), (1, 1), 0.0, "x must have 2 dimension.s., got 3"),
        (torch.zeros(()), (1, 1), 0.0, "x must have 2 dimension.s., got 0"),
        (torch.zeros(2, 3).half(), (1, 1), 0.0, "float32 or bfloat16, got (Half|torch.float16)"),
        (torch.zeros(2, 3).int(), (1, 1), 0.0, "float32 or bfloat16, got (Int|torch.int32)"),
        (torch.zeros(2, 3).to(E4M3), (1, 1), 0.0, "float32 or bfloat16, got .*[Ff]loat8_e4m3fn"),
        (torch.zeros(2, 3), (0, 1), 0.0, "at least 1 x 1, got 0 x 1"),
        (torch.zeros(2, 3), (1, 0), 0.0, "at least 1 x 1, got 1 x 0"),
        (torch.zeros(2, 3), (128, -128), 0.0, "at least 1 x 1, got 128 x -128"),
        (torch.zeros(2, 3), (1, 1), -1.0, "eps must be in .0, 1e30., got -1"),
        (torch.zeros(2, 3), (1, 1), float("nan"), "eps must be in .0, 1e30., got nan"),
        (torch.zeros(2, 3), (1, 1), float("inf"), "eps must be in .0, 1e30., got inf"),
    ],
)
def test_bad_arguments_of_quant(quant, x, block, eps, message):
    with pytest.raises(RuntimeError, match=f"fp8_block_quant: .*{message}"):
        quant(x, *block, eps)


# --- dequantising ---------------------------------------------------------------------------------


@both_dequants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_every_code_times_its_scale(dequant, dtype, scale_dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(E4M3)
    scales = torch.tensor([[0.003, 1e30], [7.0, 1e-41]]).to(scale_dtype)
    values = np.array([code_value(code) for code in range(256)], np.float32).reshape(2, 128)
    spread = scales.float().numpy().repeat(64, axis=1)
    with np.errstate(over="ignore", under="ignore"):
        expected = torch.from_numpy(values * spread).to(dtype)
    found = dequant(codes, scales, 1, 64, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.isnan().sum() == 2
    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~expected.isnan()])


@both_dequants
def test_codes_and_scales_round_trip_within_half_a_step(dequant):
    x = some(130, 200, torch.float32)
    codes, scales = fp8_block_quant(x)
    y = dequant(codes, scales, 128, 128, torch.float32)
    spread = scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :200]
    # Half of the last of 3 bits, or of the smallest denormal; two roundings to float32 besides.
    allowed = torch.maximum(x.abs() / 16, spread * 2.0**-10) * (1 + 1e-6)
    assert ((y - x).abs() <= allowed).all()


@both_dequants
@pytest.mark.parametrize(
    ("codes", "scales", "dtype", "message"),
    [
        (torch.zeros(4, 6), torch.ones(2, 2), torch.float32, "codes must be float8_e4m3fn"),
        (torch.zeros(4, 6).to(E4M3), torch.ones(2, 3), torch.float32, r"\[2, 2\] .* \[2, 3\]"),
        (torch.zeros(4, 6).to(E4M3), torch.ones(1, 2), torch.float32, r"\[2, 2\] .* \[1, 2\]"),
        (torch.zeros(4, 6).to(E4M3), torch.ones(2, 2), torch.float16, "dtype must be float32 or"),
        (torch.zeros(4, 6).to(E4M3), torch.ones(2, 2).half(), torch.float32, "scales must be fl"),
        (torch.zeros(4, 6).to(E4M3), torch.ones(4), torch.float32, "scales must have 2 dim.*got 1"),
        (torch.zeros(24).to(E4M3), torch.ones(2, 2), torch.float32, "codes must have 2 dim.*got 1"),
    ],
)
def test_bad_arguments_of_dequant(dequant, codes, scales, dtype, message):
    with pytest.raises(RuntimeError, match=f"fp8_block_dequant: .*{message}"):
        dequant(codes, scales, 2, 3, dtype)


# --- the ops --------------------------------------------------------------------------------------


@needs_native
def test_thread_count_changes_no_bit():
    x = some(700, 1000, torch.bfloat16)
    before = torch.get_num_threads()
    expected, expected_scales = quant_ref(x)
    try:
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            codes, scales = native_quant(x)
            assert same_bits(codes, expected) and same_bits(scales, expected_scales)
    finally:
        torch.set_num_threads(before)


@needs_native
def test_opcheck():
    # test_schema compares fp8 tensors, for which torch has no operator
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.megarl
    args = (torch.randn(5, 7), 2, 3, 1e-10, True)
    torch.library.opcheck(ops.fp8_block_quant, args, test_utils=checks[:2])
    args = (*native_quant(torch.randn(5, 7), 2, 3), 2, 3, torch.bfloat16)
    torch.library.opcheck(ops.fp8_block_dequant, args, test_utils=checks)


@needs_native
def test_the_public_functions_run_the_kernels(monkeypatch):
    def refuse(*_: object) -> Tensor:
        raise AssertionError("the reference ran although the kernel is loaded")

    module = sys.modules["megarl.ops.fp8_block"]
    monkeypatch.setattr(module, "fp8_block_quant_ref", refuse)
    monkeypatch.setattr(module, "fp8_block_dequant_ref", refuse)
    x = torch.ones(3, 200, requires_grad=True)
    codes, scales = fp8_block_quant(x)
    y = fp8_block_dequant(codes, scales, dtype=torch.float32)
    assert torch.equal(y, torch.ones(3, 200)) and not y.requires_grad


# --- CUDA -----------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the reference would pass the tests below.
    assert "cuda" in _native.native_devices("fp8_block_quant"), "the CUDA kernel is not built"
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [(128, 128), (1, 128)])
def test_cuda_gives_the_cpus_bits(cuda, dtype, block):
    x = some(1000, 1500, dtype)
    codes, scales = fp8_block_quant(x, block=block)
    on_gpu, gpu_scales = fp8_block_quant(x.to(cuda), block=block)
    assert same_bits(on_gpu.cpu(), codes) and same_bits(gpu_scales.cpu(), scales)
    y = fp8_block_dequant(on_gpu, gpu_scales, block=block, dtype=dtype)
    assert same_bits(y.cpu(), fp8_block_dequant(codes, scales, block=block, dtype=dtype))


@pytest.mark.gpu
def test_cuda_prints_what_is_not_finite_and_stops(cuda):
    code = (
        "import torch; from megarl.ops import fp8_block_quant\n"
        "x = torch.ones(4, 300); x[2, 200] = float('inf')\n"
        "fp8_block_quant(x.cuda())[1].sum().item()"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode != 0
    assert "got inf at [2, 200]" in run.stdout + run.stderr
