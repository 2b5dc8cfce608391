"""A delta once more, from its definition: a loop over bytes in Python integers; and tensors to make
one of.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Damaged(Exception):
    """A payload that does not add up."""


def patterns(tensor: Tensor) -> list[int]:
    item = tensor.element_size()
    return [p % (1 << 8 * item) for p in tensor.reshape(-1).view(BITS[item]).tolist()]


def decode(old: list[int], item: int, payload: bytes) -> list[int]:
    """The new bit patterns. Raises Damaged."""
    if not payload:
        return list(old)
    if len(payload) == item * len(old):
        return [number(payload[k : k + item]) for k in range(0, len(payload), item)]
    chunks = -(-len(old) // 4096)
    if not 2 * chunks <= len(payload) < item * len(old):
        raise Damaged("length")
    rest = payload[2 * chunks :]
    new: list[int] = []
    for c in range(chunks):
        part = old[4096 * c : 4096 * (c + 1)]
        size = number(payload[2 * c : 2 * c + 2])
        new += decode_chunk(part, item, rest[:size]) if size else part
        if len(rest) < size:
            raise Damaged("table")
        rest = rest[size:]
    if rest:
        raise Damaged("table")
    return new


def decode_chunk(old: list[int], item: int, chunk: bytes) -> list[int]:
    blocks = [old[k : k + 256] for k in range(0, len(old), 256)]
    left = iter(chunk)
    codes = list(take(left, len(blocks)))
    places = [
        list(places_of(left, code % 128, len(b))) for code, b in zip(codes, blocks, strict=True)
    ]
    new = []
    for code, block, changed in zip(codes, blocks, places, strict=True):
        if code == 128:
            raise Damaged("narrow nothing")
        values = values_of(left, len(changed), 8 * item // (2 if code >= 128 else 1))
        for i, value in zip(changed, values, strict=True):
            if code >= 128:
                sign = 1 << 4 * item - 1
                block[i] = (block[i] + (value ^ sign) - sign) % (1 << 8 * item)
            else:
                block[i] = value
        new += block
    if list(left):
        raise Damaged("more than it should have")
    return new


def places_of(left: Iterator[int], kind: int, size: int) -> Iterator[int]:
    if kind == 33:
        yield from range(size)
    elif kind == 32:
        bits = number(take(left, -(-size // 8)))
        if bits >> size:
            raise Damaged("a bit beyond the block")
        yield from (i for i in range(size) if bits >> i & 1)
    elif kind < 32:
        before = -1
        for place in take(left, kind):
            if not before < place < size:
                raise Damaged("a place")
            yield place
            before = place
    else:
        raise Damaged("a code")


def values_of(left: Iterator[int], count: int, width: int) -> list[int]:
    """Of so many bits each; together they fill up bytes."""
    bits = number(take(left, -(-count * width // 8)))
    return [bits >> width * k & (1 << width) - 1 for k in range(count)]


def take(left: Iterator[int], count: int) -> bytes:
    taken = bytes(byte for _, byte in zip(range(count), left, strict=False))
    if len(taken) < count:
        raise Damaged("less than it should have")
    return taken


def number(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def some_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every pattern: NaNs and denormals among them."""
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def updated(old: Tensor, share: float, most: int, generator: torch.Generator) -> Tensor:
    """``share`` of the elements by a step of at most ``most`` patterns, at least 1."""
    bits = old.view(BITS[old.element_size()])
    steps = torch.randint(1, most + 1, bits.shape, generator=generator)
    steps *= torch.randint(0, 2, bits.shape, generator=generator) * 2 - 1
    chosen = torch.rand(bits.shape, generator=generator) < share
    return (bits.long() + steps * chosen).to(bits.dtype).view(old.dtype)
