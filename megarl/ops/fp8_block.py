"""FP8 weights and activations in blocks: e4m3 codes and one scale a block, as servers load them.

Shapes: x [N, K]; blocks of block_n x block_k, [ceil(N / block_n), ceil(K / block_k)] of them: of
128 x 128 for weights, 1 x 128 for activations. A block at an edge holds what there is of it.

    amax  = largest |x| of the block
    scale = max(amax, eps) / 448                   448 is the largest e4m3
    code  = e4m3(x * (1 / scale))                  to nearest, ties to even, saturating
    y     = code * scale                           in float32, then rounded to the dtype asked for

1. The reciprocal is taken once and multiplied with: x / scale gives other codes, one in 3,000.
2. `power_of_two` rounds the scale up to one (ceil, as DeepGEMM; e8m0 casts round to nearest).
3. A block whose scale would be below the smallest normal float32 has scale 1: zeros with eps = 0.
4. `eps` is part of the format: servers and trainers must have one. Others': 1e-10 (slime), 1e-4
   (DeepGEMM, SGLang), 0 (Transformer Engine).
5. NaN and infinities are refused: a code of 448 would hide them. NaN codes dequantise to NaN.

Neither op is differentiable: quantising is a step function, and no gradient is defined for it here.
"""

import torch
from torch import Tensor

from megarl.ops._arguments import check_device, check_dim, check_type
from megarl.ops._native import native_devices, runs_native
from megarl.ops._selfcheck import self_check

E4M3_MAX = 448.0
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
Block = tuple[int, int]


def fp8_block_quant(
    x: Tensor, *, block: Block = (128, 128), eps: float = 1e-10, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """x f32|bf16 [N, K] -> codes e4m3 [N, K], scales f32 [ceil(N / block_n), ceil(K / block_k)].

    RuntimeError that counts them and names the first, for values that are not finite.
    """
    x = x.detach()
    if runs_native("fp8_block_quant", x.device):
        codes, scales = torch.ops.megarl.fp8_block_quant(x, *block, eps, power_of_two)
        return codes, scales
    return fp8_block_quant_ref(x, *block, eps, power_of_two)


def fp8_block_dequant(
    codes: Tensor,
    scales: Tensor,
    *,
    block: Block = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """codes e4m3 [N, K], scales f32|bf16 [ceil(N / block_n), ceil(K / block_k)] -> dtype [N, K];
    dtype: float32 or bfloat16.
    """
    if runs_native("fp8_block_dequant", codes.device):
        out: Tensor = torch.ops.megarl.fp8_block_dequant(codes, scales.detach(), *block, dtype)
        return out
    return fp8_block_dequant_ref(codes, scales.detach(), *block, dtype)


def fp8_block_quant_ref(
    x: Tensor, block_n: int, block_k: int, eps: float, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """The specification of `fp8_block_quant`, in plain torch."""
    _check_quant(x, block_n, block_k, eps)
    check_finite("fp8_block_quant", x)
    blocks = in_blocks(x.float(), block_n, block_k)
    scales = blocks.abs().amax((1, 3)).clamp_min(eps) / E4M3_MAX
    scales = torch.where(scales >= _SMALLEST_NORMAL, scales, 1.0)
    if power_of_two:
        bits = scales.view(torch.int32)
        scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scaled = (blocks * (1 / scales)[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn)
    codes = codes.view(blocks.shape[0] * block_n, blocks.shape[2] * block_k)
    return codes[: x.shape[0], : x.shape[1]].contiguous(), scales


def fp8_block_dequant_ref(
    codes: Tensor, scales: Tensor, block_n: int, block_k: int, dtype: torch.dtype
) -> Tensor:
    """The specification of `fp8_block_dequant`, in plain torch."""
    _check_dequant(codes, scales, block_n, block_k, dtype)
    blocks = in_blocks(codes.float(), block_n, block_k) * scales.float()[:, None, :, None]
    whole = blocks.view(blocks.shape[0] * block_n, blocks.shape[2] * block_k)
    return whole[: codes.shape[0], : codes.shape[1]].to(dtype).contiguous()


def in_blocks(x: Tensor, block_n: int, block_k: int) -> Tensor:
    """[N, K] -> [ceil(N / block_n), block_n, ceil(K / block_k), block_k], filled up with zeros."""
    rows, columns = _grid(x, block_n, block_k)
    pads = (0, columns * block_k - x.shape[1], 0, rows * block_n - x.shape[0])
    return torch.nn.functional.pad(x, pads).view(rows, block_n, columns, block_k)


def _grid(x: Tensor, block_n: int, block_k: int) -> tuple[int, int]:
    return -(-x.shape[0] // block_n), -(-x.shape[1] // block_k)


def _check_quant(x: Tensor, block_n: int, block_k: int, eps: float) -> None:
    op = "fp8_block_quant"
    check_dim(op, "x", x, 2)
    check_type(op, "x", x, torch.float32, torch.bfloat16)
    _check_block(op, block_n, block_k)
    if not 0 <= eps < 1e30:
        raise RuntimeError(f"{op}: eps must be in [0, 1e30), got {eps:g}")


def check_finite(op: str, x: Tensor) -> None:
    """Of x [N, K]. Reads the values, for which an accelerator must stop."""
    wrong = ~x.isfinite()
    count = int(wrong.sum())
    if count:
        row, column = wrong.nonzero()[0].tolist()
        raise RuntimeError(
            f"{op}: x must be finite, got {count} value(s) that are not, "
            f"the first {x[row, column].item():g} at [{row}, {column}]"
        )


def _check_dequant(
    codes: Tensor, scales: Tensor, block_n: int, block_k: int, dtype: torch.dtype
) -> None:
    op = "fp8_block_dequant"
    check_dim(op, "codes", codes, 2)
    check_type(op, "codes", codes, torch.float8_e4m3fn)
    check_dim(op, "scales", scales, 2)
    check_type(op, "scales", scales, torch.float32, torch.bfloat16)
    check_device(op, "scales", scales, codes)
    _check_block(op, block_n, block_k)
    rows, columns = _grid(codes, block_n, block_k)
    if tuple(scales.shape) != (rows, columns):
        raise RuntimeError(
            f"{op}: scales must be [{rows}, {columns}] for codes {list(codes.shape)}, "
            f"got {list(scales.shape)}"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(f"{op}: dtype must be float32 or bfloat16, got {dtype}")


def _check_block(op: str, block_n: int, block_k: int) -> None:
    if block_n < 1 or block_k < 1:
        raise RuntimeError(f"{op}: blocks must be at least 1 x 1, got {block_n} x {block_k}")


def _fake_quant(
    x: Tensor, block_n: int, block_k: int, eps: float, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    _check_quant(x, block_n, block_k, eps)
    scales = x.new_empty(_grid(x, block_n, block_k), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


def _fake_dequant(
    codes: Tensor, scales: Tensor, block_n: int, block_k: int, dtype: torch.dtype
) -> Tensor:
    _check_dequant(codes, scales, block_n, block_k, dtype)
    return codes.new_empty(codes.shape, dtype=dtype)


if native_devices("fp8_block_quant"):
    torch.library.register_fake("megarl::fp8_block_quant", _fake_quant)
if native_devices("fp8_block_dequant"):
    torch.library.register_fake("megarl::fp8_block_dequant", _fake_dequant)


def _example(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 391, generator=generator)
    x = x * torch.logspace(-8, 4, 391)  # from denormal codes to saturating ones
    x[:128, 128:256] = 0
    return x.to(dtype)


@self_check("fp8_block_quant")
def _check_quant_kernel(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for args in ((128, 128, 1e-10, False), (1, 128, 0.0, True)):
            x = _example(dtype)
            codes, scales = torch.ops.megarl.fp8_block_quant(x.to(device), *args)
            expected, expected_scales = fp8_block_quant_ref(x, *args)
            torch.testing.assert_close(scales.cpu(), expected_scales, rtol=0, atol=0)
            torch.testing.assert_close(
                codes.cpu().view(torch.uint8), expected.view(torch.uint8), rtol=0, atol=0
            )


@self_check("fp8_block_dequant")
def _check_dequant_kernel(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(130, 1).view(torch.float8_e4m3fn)
    scales = torch.tensor([[0.001, 3.0], [1e-6, 700.0]])
    for dtype in (torch.float32, torch.bfloat16):
        for scale in (scales, scales.bfloat16()):
            args = (128, 128, dtype)
            found = torch.ops.megarl.fp8_block_dequant(codes.to(device), scale.to(device), *args)
            expected = fp8_block_dequant_ref(codes, scale, *args)
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
