"""The recipes of FP8 against their definitions, computed in numpy on tables of the codes' values.

Comparisons are of bits.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.ops import fp8_block_quant
from megarl.ops import fp8_emulation as fp8

# --- an independent implementation ----------------------------------------------------------------


def table(exponent_bits: int, mantissa_bits: int, largest: float) -> np.ndarray:
    """Every value from 0 up to the largest, rising; denormals have the exponent of 1."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        normal = exponent > 0
        fraction = mantissa / 2**mantissa_bits + normal
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    return np.array([v for v in values if v <= largest])


TABLES = {"e4m3": table(4, 3, 448.0), "e5m2": table(5, 2, 57344.0)}
FORMATS = list(TABLES)


def nearest(x: np.ndarray, format: str) -> np.ndarray:
    """float32 -> the nearest value of the table by distance in float64; a tie to the even code."""
    values = TABLES[format]
    magnitude = np.minimum(np.abs(x.astype(np.float64)), values[-1])
    above = np.minimum(np.searchsorted(values, magnitude), len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - magnitude, magnitude - values[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.copysign(values[code], x).astype(np.float32)


def by_parts(x: np.ndarray, block: tuple[int, int], of_part) -> np.ndarray:
    out = np.zeros(x.shape, np.float32)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            at = np.s_[i : i + block[0], j : j + block[1]]
            out[at] = of_part(x[at])
    return out


def plain_tensorwise(x: np.ndarray, format: str) -> np.ndarray:
    amax, largest = np.abs(x).max(initial=0), np.float32(TABLES[format][-1])
    with np.errstate(over="ignore"):
        multiplier = largest / amax if amax > 0 else np.float32(1)
    multiplier = min(multiplier, np.finfo(np.float32).max)
    return nearest(x * multiplier, format) * (np.float32(1) / multiplier)


def plain_blockwise(x: np.ndarray, block, format: str, power_of_two: bool) -> np.ndarray:
    def part(values: np.ndarray) -> np.ndarray:
        scale = np.abs(values).max() / np.float32(TABLES[format][-1])
        if power_of_two and scale:
            mantissa, exponent = np.frexp(scale)
            scale = np.float32(np.ldexp(1.0, exponent - (mantissa == 0.5)))
        if scale < np.finfo(np.float32).smallest_normal:
            scale = np.float32(1)
        return nearest(values * (np.float32(1) / scale), format) * scale

    return by_parts(x, block, part)


def plain_mxfp8(x: np.ndarray, format: str) -> np.ndarray:
    def part(values: np.ndarray) -> np.ndarray:
        inverse = np.float32(1) / np.float32(TABLES[format][-1])
        ratio = float(np.abs(values).max() * inverse)
        exponent = -127 if ratio == 0 else max(int(np.ceil(np.log2(ratio))), -127)
        scaled = values.astype(np.float64) * 2.0**-exponent
        return (nearest(scaled.astype(np.float32), format) * 2.0**exponent).astype(np.float32)

    return by_parts(x, (1, 32), part)


def some(n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Magnitudes over many powers of two: denormal codes, zeros, ties and saturation occur."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator)
    x *= torch.exp2(torch.randint(-24, 4, (n, k), generator=generator))
    x[n // 2, k // 3 :] = 0  # for long rows whole blocks of zeros
    x[0, 0] = -0.0
    return x.to(dtype)


def same(found: Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy().view(np.int32), expected.view(np.int32))


SHAPES = [(256, 384), (130, 257), (1, 300), (1, 1), (5, 3), (129, 32)]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
formats = pytest.mark.parametrize("format", FORMATS)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)

# --- the recipes ----------------------------------------------------------------------------------


@dtypes
@formats
@shapes
def test_tensorwise_is_its_definition(shape, format, dtype):
    x = some(*shape, dtype)
    same(fp8.tensorwise(x, format=format), plain_tensorwise(x.float().numpy(), format))


@dtypes
@formats
@shapes
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (1, 128)], ids=str)
def test_blockwise_is_its_definition(shape, format, dtype, power_of_two, block):
    x = some(*shape, dtype)
    found = fp8.blockwise(x, block=block, format=format, power_of_two=power_of_two)
    same(found, plain_blockwise(x.float().numpy(), block, format, power_of_two))


@dtypes
@formats
@shapes
def test_mxfp8_is_its_definition(shape, format, dtype):
    x = some(*shape, dtype)
    same(fp8.mxfp8(x, format=format), plain_mxfp8(x.float().numpy(), format))


@formats
def test_values_of_the_format_and_points_between_them_round_to_nearest_even(format):
    values = TABLES[format]
    halves = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    points = [values, halves, np.nextafter(halves, np.float32(0))]
    points += [np.nextafter(halves, np.float32(1e9)), [1e-30, 2.0**-149, 1e9, 3e38]]
    row = np.concatenate(points).astype(np.float32)
    x = torch.from_numpy(np.concatenate([row, -row]))[None]
    same(fp8.scaled(x, torch.tensor(1.0), format=format), nearest(x.numpy(), format))


@formats
@pytest.mark.parametrize("multiplier", [3.0, 2.0**20, 1e-3, 3.4028235e38])
def test_a_given_multiplier_is_used_as_it_is(format, multiplier):
    x = some(9, 70)
    m = np.float32(multiplier)
    with np.errstate(over="ignore"):
        expected = nearest(x.float().numpy() * m, format) * (np.float32(1) / m)
    same(fp8.scaled(x, torch.tensor(m), format=format), expected)


@formats
@pytest.mark.parametrize("size", [1e-44, 1e-38, 3e-36, 1e38])
def test_the_ends_of_float32_neither_overflow_nor_divide_by_zero(format, size):
    x = torch.full((2, 33), size)
    x[1] = 0
    values = x.numpy()
    same(fp8.tensorwise(x, format=format), plain_tensorwise(values, format))
    same(fp8.mxfp8(x, format=format), plain_mxfp8(values, format))
    found = fp8.blockwise(x, block=(1, 128), format=format, power_of_two=False)
    same(found, plain_blockwise(values, (1, 128), format, False))


RECIPES = {
    "tensorwise": lambda x: fp8.tensorwise(x, format="e4m3"),
    "delayed": lambda x: fp8.scaled(x, torch.tensor(2.0), format="e4m3"),
    "blockwise": lambda x: fp8.blockwise(x, block=(1, 128), format="e4m3", power_of_two=False),
    "blockwise e5m2": lambda x: fp8.blockwise(
        x, block=(128, 128), format="e5m2", power_of_two=True
    ),
    "mxfp8": lambda x: fp8.mxfp8(x, format="e4m3"),
}
recipes = pytest.mark.parametrize("recipe", list(RECIPES))


@recipes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_by_their_place(recipe, value):
    x = torch.ones(4, 200)
    x[2, 150] = value
    with pytest.raises(RuntimeError, match=rf"finite, got 1 .* {value:g} at \[2, 150\]"):
        RECIPES[recipe](x)


@recipes
@pytest.mark.parametrize("shape", [(0, 64), (0, 0)])
def test_an_empty_tensor_stays_empty(recipe, shape):
    found = RECIPES[recipe](torch.zeros(shape, dtype=torch.bfloat16))
    assert found.shape == shape and found.dtype == torch.float32


def test_power_of_two_scales_are_those_of_a_multiplier_rounded_down():
    """Transformer Engine rounds 448 / amax down, we round amax / 448 up: for every bf16 the same
    power, as long as it is no denormal.
    """
    every = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    amax = every[every > 448 * 2.0**-126].numpy()
    multiplier = (np.float32(448) / amax).view(np.int32) & 0x7F800000
    expected = 1 / multiplier.view(np.float32)
    x = torch.from_numpy(amax)[:, None]
    found = fp8_block_quant(x, block=(1, 1), eps=0.0, power_of_two=True)[1][:, 0]
    np.testing.assert_array_equal(found.numpy(), expected)


# --- delayed scaling ------------------------------------------------------------------------------


@formats
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("margin", [0.0, 2.0])
def test_a_history_counts_the_last_steps_that_saw_something(format, algo, length, margin):
    rng = np.random.default_rng(length)
    steps = np.exp2(rng.integers(-9, 9, (14, 3))).astype(np.float32)
    steps[4, 0] = steps[5, 1] = steps[9] = 0
    history, multipliers = torch.zeros(length, 3), torch.ones(3)
    seen: list[list[float]] = [[], [], []]
    for step in steps:
        history[0] = torch.maximum(history[0], torch.from_numpy(step))
        fp8.advance(history, multipliers, format=format, algo=algo, margin=margin)
        for tensor, amax in enumerate(step):
            if amax:
                seen[tensor].append(float(amax))
            if seen[tensor]:
                window = seen[tensor][-length:]
                amax = max(window) if algo == "max" else window[-1]
                assert multipliers[tensor] == TABLES[format][-1] / 2**margin / amax
            else:
                assert multipliers[tensor] == 1
        assert not history[0].any()


def test_what_is_seen_before_a_step_ends_does_not_count_twice():
    """Row 0 gathers the largest of what passes; several in one step are one entry."""
    history, multipliers = torch.zeros(3, 1), torch.ones(1)
    for amax in (2.0, 8.0, 4.0):
        history[0] = history[0].clamp_min(amax)
    fp8.advance(history, multipliers, format="e4m3", algo="max")
    assert multipliers.tolist() == [448 / 8.0] and history[:, 0].tolist() == [0, 0, 8.0]
