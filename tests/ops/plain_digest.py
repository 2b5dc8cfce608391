"""The digest once more, from its definition: a loop over bytes in Python integers."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

P = 2**61 - 1
DTYPES = [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16]
DTYPES += [torch.float16, torch.int16, torch.float32, torch.int32, torch.float64, torch.int64]
DTYPES += [torch.complex64]


def splitmix64(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


WORD_KEYS = [splitmix64(int.from_bytes(b"megarl_C", "big") + j) >> 32 for j in range(1024)]


def block_key(block: int) -> int:
    return (splitmix64(int.from_bytes(b"megarl_R", "big") + block) >> 3) % (P - 1) + 1


def plain(values: bytes, positions: Sequence[int]) -> int:
    """Of bytes at those positions of the whole tensor."""
    return (
        sum(
            (b + 1) * 256 ** (g % 4) * WORD_KEYS[g // 4 % 1024] * block_key(g // 4096)
            for b, g in zip(values, positions, strict=True)
        )
        % P
    )


def plain_slice(part: Tensor, full_shape: Sequence[int], offset: Sequence[int]) -> int:
    positions = []
    size = part.element_size()
    for index in product(*map(range, part.shape)):
        at = 0
        for i, start, full in zip(index, offset, full_shape, strict=True):
            at = at * full + start + i
        positions += range(at * size, (at + 1) * size)
    return plain(raw(part), positions)


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def some(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random bits: NaNs and denormals among them. A bool's are 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    count = torch.Size(shape).numel() * dtype.itemsize
    bytes_ = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return bytes_.view(dtype).reshape(shape)
