"""What changed of a tensor, in few bytes, and the same change made elsewhere.

Elements have 1, 2 or 4 bytes and are bit patterns here: -0.0 and 0.0 differ, NaN payloads count.
A block is 256 elements in row-major order, a chunk 16 blocks; the last of each may be shorter.
Numbers are little-endian.

    payload = delta_encode_(base, new)      base becomes new
    delta_apply_(base, payload)             so does another copy of what base was

1. A payload's length says what it is. 0 bytes: nothing changed. As many as the tensor: the new
   bytes, whole. Fewer: a table u16 [chunks], how many bytes each chunk has, and then the chunks. A
   chunk in which nothing changed has 0.
2. A chunk: a code u8 for each of its blocks, the places of every block, the values of every block.
3. A code is 0 where nothing changed, else a kind from 1 on, plus 128 where values are narrow:
       1..31    so many positions u8 in the block, in order
       32       a bitmap of ceil(m / 8) bytes for the block's m elements, from the lowest bit on
       33       all elements of the block; no places
4. Values are those of the changed elements, in order: new bit patterns; or, narrow, steps of half
   the width, signed, that are added to the old bit patterns modulo the width. Steps of 1-byte
   elements have 4 bits: two a byte, the first in the lower half, a last one alone.
5. The encoder writes kind 33 where all m changed, else positions where they are fewer than ceil(m /
   8), else a bitmap; narrow where every step of a block is; the whole tensor where that is no
   longer. So a payload is never longer than its tensor.
6. Whatever does not add up is refused before an element is written: table, codes, lengths, places
   that are out of order or not in their block. What adds up and is wrong all the same, a digest
   has to tell (``ops/digest.py``), as it has to that base is what the payload is for.

Neither op is differentiable: they are about bits.
"""

import torch
from torch import Tensor

from megarl.ops._arguments import check_type
from megarl.ops._delta_ref import (
    APPLY,
    BITS,
    BLOCK,
    BLOCKS,
    CHUNK,
    ENCODE,
    check_base,
    check_encode,
    delta_apply_ref_,
    delta_encode_ref_,
)
from megarl.ops._native import native_devices, runs_native
from megarl.ops._selfcheck import self_check


def delta_encode_(base: Tensor, new: Tensor) -> Tensor:
    """What makes ``base`` into ``new``, u8 [P], at most the tensor's bytes; ``base`` becomes it.

    Both: one shape and dtype of 1, 2 or 4 bytes, on one device; ``base`` contiguous. On an
    accelerator it waits for the device, since P depends on what is there. RuntimeError for other
    arguments.
    """
    base, new = base.detach(), new.detach()
    if runs_native(ENCODE, base.device):
        payload: Tensor = torch.ops.megarl.delta_encode_(base, new)
        return payload
    return delta_encode_ref_(base, new)


def delta_apply_(base: Tensor, payload: Tensor) -> None:
    """Does to ``base`` what ``payload`` u8 [P] says, which was made for the tensor it is.

    ``base``: contiguous, elements of 1, 2 or 4 bytes. RuntimeError, and nothing is written, for a
    payload that is no change of such a tensor; on an accelerator it waits for the device to know.
    """
    base, payload = base.detach(), payload.detach()
    if runs_native(APPLY, base.device):
        torch.ops.megarl.delta_apply_(base, payload)
    else:
        delta_apply_ref_(base, payload)


def _fake_encode(base: Tensor, new: Tensor) -> Tensor:
    check_encode(base, new)
    size = torch.library.get_ctx().new_dynamic_size()
    return base.new_empty(size, dtype=torch.uint8)


def _fake_apply(base: Tensor, payload: Tensor) -> None:
    """The payload's length is not known there."""
    check_base(APPLY, base)
    check_type(APPLY, "payload", payload, torch.uint8)


if native_devices(ENCODE):
    torch.library.register_fake(f"megarl::{ENCODE}", _fake_encode)
if native_devices(APPLY):
    torch.library.register_fake(f"megarl::{APPLY}", _fake_apply)


def _example(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks of every kind, narrow and not, and a part of one; a chunk that stays."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (3 * CHUNK + 300, 4), dtype=torch.uint8, generator=generator)
    old = bits.view(torch.int32)[:, 0].view(-1).to(BITS[dtype.itemsize])
    new = old.clone()
    for block in (*range(BLOCKS), *range(2 * BLOCKS, 3 * BLOCKS + 2)):
        part = new[block * BLOCK : (block + 1) * BLOCK]
        share = (0.0, 0.02, 0.1, 0.4, 1.0)[block % 5]
        steps = torch.randint(1, 4, part.shape, generator=generator) * (50 if block % 2 else 1)
        part += torch.where(torch.rand(part.shape, generator=generator) < share, steps, 0)
    return old.view(dtype), new.view(dtype)


@self_check(ENCODE)
def _check_encode_kernel(device: torch.device) -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        old, new = _example(dtype)
        base, expected = old.to(device), delta_encode_ref_(old.clone(), new)
        found = torch.ops.megarl.delta_encode_(base, new.to(device))
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
        _assert_same_bits(base, new)


@self_check(APPLY)
def _check_apply_kernel(device: torch.device) -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        old, new = _example(dtype)
        base, payload = old.to(device), delta_encode_ref_(old.clone(), new)
        torch.ops.megarl.delta_apply_(base, payload.to(device))
        _assert_same_bits(base, new)


def _assert_same_bits(found: Tensor, expected: Tensor) -> None:
    bits = found.cpu().view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(*bits, rtol=0, atol=0)
