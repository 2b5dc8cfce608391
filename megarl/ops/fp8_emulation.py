"""FP8 as Transformer Engine's recipes round it, without FP8: what is left of an operand of a matrix
product after it was quantised and read back. x f32|bf16 [N, K] -> f32 [N, K].

    code = cast(x * multiplier)       to nearest, ties to even, saturating
    y    = code * (1 / multiplier)

What shares a multiplier, and which (``largest``: of the format, e4m3 448, e5m2 57344):

    tensorwise   the tensor       largest / amax
    delayed      the tensor       given: ``next_multiplier`` of largest entries seen before
    blockwise    N x K of it      1 / scale of ``fp8_block.py`` with eps = 0, whose rules those are
    mxfp8        1 x 32           2^-e, with 2^e = amax * (1 / largest) rounded up to a power of two

1. A tensor of zeros has the multiplier 1. Where largest / amax is beyond float32 it is the largest
   float32. A row of 32 zeros has e = -127.
2. Blocks at an edge hold what there is. An empty tensor stays empty.
3. Every result is a product of a code (4 bits) and a float32, rounded once to float32: bits that a
   kernel which scales sums of code products does not lose, 2^-24 of each operand. Powers of two
   lose nothing.
4. NaN and infinities are refused, named by their place: RuntimeError. ``finite_rows`` and
   ``with_bad`` let a product of rows pass them on instead.

Sources: OCP Microscaling Formats 1.0 (mxfp8); DeepSeek-V3, section 3.3 (blockwise).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.ops.fp8_block import (
    Block,
    check_finite,
    fp8_block_dequant,
    fp8_block_quant,
    in_blocks,
)

MX_BLOCK = 32
_F32_MAX = torch.finfo(torch.float32).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True)
class Format:
    dtype: torch.dtype
    largest: float


FORMATS = {
    "e4m3": Format(torch.float8_e4m3fn, 448.0),
    "e5m2": Format(torch.float8_e5m2, 57344.0),
}


def tensorwise(x: Tensor, *, format: str) -> Tensor:
    """One multiplier, by the present largest entry."""
    check_finite("tensorwise", x)
    one = torch.ones((), device=x.device)
    return scaled(x, next_multiplier(amax(x), one, format=format), format=format)


def scaled(x: Tensor, multiplier: Tensor, *, format: str) -> Tensor:
    """One multiplier, f32 []: entries beyond ``largest / multiplier`` saturate there."""
    check_finite("scaled", x)
    return _cast(x.float() * multiplier, FORMATS[format]) * (1 / multiplier)


def blockwise(x: Tensor, *, block: Block, format: str, power_of_two: bool) -> Tensor:
    """e4m3: the codes and scales of ``fp8_block_quant``, on whatever it runs."""
    if not x.numel():
        return x.float()
    if format == "e4m3":
        codes, scales = fp8_block_quant(x, block=block, eps=0.0, power_of_two=power_of_two)
        return fp8_block_dequant(codes, scales, block=block, dtype=torch.float32)
    check_finite("blockwise", x)
    blocks = in_blocks(x.float(), *block)
    scales = blocks.abs().amax((1, 3)) / FORMATS[format].largest
    scales = torch.where(scales >= _SMALLEST_NORMAL, scales, 1.0)
    if power_of_two:
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    spread = scales[:, None, :, None]
    return _cropped(_cast(blocks * (1 / spread), FORMATS[format]) * spread, x)


def mxfp8(x: Tensor, *, format: str) -> Tensor:
    """A power of two for every 32 entries of a row."""
    check_finite("mxfp8", x)
    if not x.numel():
        return x.float()
    of = FORMATS[format]
    blocks = in_blocks(x.float(), 1, MX_BLOCK)
    bits = (blocks.abs().amax((1, 3)) * (1 / torch.tensor(of.largest))).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    stays = (mantissa == 0) | ((exponent == 0) & (mantissa <= 0x400000)) | (exponent == 0xFE)
    exponent = torch.where(stays, exponent, exponent + 1)  # biased: 2^(exponent - 127)
    scale = torch.exp2((exponent - 127).double())[:, None, :, None]
    values = _cast((blocks.double() / scale).float(), of)
    return _cropped((values.double() * scale).float(), x)


def amax(x: Tensor) -> Tensor:
    """f32 []; 0 of an empty tensor."""
    return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def finite_rows(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with zeros for rows that are not finite, and which these are, bool [N], if any."""
    bad = ~x.isfinite().all(1)
    if not bad.any():
        return x, None
    return x.masked_fill(bad[:, None], 0), bad


def with_bad(y: Tensor, bad: Tensor | None) -> Tensor:
    """y [N, ...], in place: NaN in the rows that ``finite_rows`` found."""
    return y if bad is None else y.masked_fill_(bad[:, None], float("nan"))


def next_multiplier(amax: Tensor, present: Tensor, *, format: str, margin: float = 0.0) -> Tensor:
    """``largest * 2^-margin / amax``, f32 of any shape; the present one where amax is 0."""
    wanted = torch.tensor(FORMATS[format].largest * 2.0**-margin, device=amax.device)
    return torch.where(amax > 0, (wanted / amax).clamp_max(_F32_MAX), present)


def advance(
    history: Tensor, multipliers: Tensor, *, format: str, algo: str, margin: float = 0.0
) -> None:
    """The end of a step of delayed scaling, in place: history f32 [L, n] of n tensors, multipliers
    f32 [n].

    Row 0 is what the present step saw, rows 1 to L - 1 are earlier steps, oldest first. ``algo``:
    ``max`` of all rows or ``most_recent``, row 0. The oldest then makes room. A tensor that saw
    nothing but zeros keeps its multiplier and its history.
    """
    seen = history[0] > 0
    rolled = history.roll(-1, 0)
    largest = rolled.amax(0) if algo == "max" else history[0].clone()
    rolled[0] = 0
    present = torch.where(seen, largest, 0.0)
    multipliers.copy_(next_multiplier(present, multipliers, format=format, margin=margin))
    history.copy_(torch.where(seen, rolled, history))


def _cast(x: Tensor, to: Format) -> Tensor:
    """x f32, finite -> the nearest value of the format, f32."""
    return x.clamp(-to.largest, to.largest).to(to.dtype).float()


def _cropped(blocks: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``in_blocks``."""
    rows, block_n, columns, block_k = blocks.shape
    whole = blocks.reshape(rows * block_n, columns * block_k)
    return whole[: like.shape[0], : like.shape[1]].contiguous()
