"""One kernel of Transformer Engine's on CPU tensors: matrices to FP8 in blocks of 128 x 128, which
its constructors call where parameters are kept in FP8. Only workers that call ``install`` have it.

    s = max |x| of the block;  code = e4m3(x * 448 / s), with 448 / s rounded down to a power of two
    where the quantizer says so
"""

from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine_torch as kernels
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

BLOCK, LARGEST = 128, 448.0


def install() -> None:
    of_gpus = kernels.quantize

    def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        if not isinstance(quantizer, Float8BlockQuantizer) or quantizer.block_scaling_dim != 2:
            return of_gpus(tensor, quantizer, output, noop)
        if output is None:
            shape, device = tensor.shape, tensor.device
            output = quantizer.make_empty(shape, dtype=tensor.dtype, device=device)
        codes, inverse = blocks(tensor.detach().float(), quantizer.force_pow_2_scales)
        _fill(output._rowwise_data, output._rowwise_scale_inv, codes, inverse)
        _fill(output._columnwise_data, output._columnwise_scale_inv, codes.t(), inverse.t())
        return output

    kernels.quantize = quantize


def blocks(matrix: torch.Tensor, powers_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """f32 [M, N] -> (codes u8 [M, N], scale of each block f32 [ceil(M/128), ceil(N/128)])."""
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    largest = tiles.abs().amax((1, 3))
    scale = torch.where(largest > 0, LARGEST / largest, torch.ones_like(largest))
    if powers_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    scaled = (tiles * scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), 1 / scale


def _fill(data: Any, scales: Any, codes: torch.Tensor, inverse: torch.Tensor) -> None:
    if data is not None:
        data.copy_(codes.reshape(data.shape))
        scales.zero_()
        scales[: inverse.size(0), : inverse.size(1)] = inverse
