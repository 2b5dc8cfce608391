"""A digest of a tensor at memory speed, which digests of its slices add up to.

For what must not be corrupted on its way: weights sent to servers, checkpoints, conversions. Shards
of TP, PP and EP are digested where they lie and their partial digests merged, without gathering.

The whole tensor is its bytes in row-major order. Word w is bytes 4w..4w+3, little-endian; a block
is 1,024 words; arithmetic is modulo the prime p = 2^61 - 1.

    partial = sum over the bytes held, each at byte g of the whole tensor, w = g div 4:
                  (byte + 1) * 256^(g mod 4) * C[w mod 1024] * R(w div 1024)
    C[j] = splitmix64("megarl_C" + j) >> 32
    R(h) = (splitmix64("megarl_R" + h) >> 3) mod (p - 1) + 1
    digest = the first 16 hex digits of sha256("dtype|shape|partial"), partial in 16 hex digits

1. A byte counts by its bit pattern and its position in the whole tensor: -0.0 and 0.0 differ, NaN
   payloads count, the layout in memory does not.
2. Partials of slices that cover the tensor once merge into the whole tensor's, in any order. The
   `+ 1` makes a slice that is missing, or comes twice, visible even where it is all zeros.
3. Faults that certainly change the partial, for p is prime and no C is another's multiple by 256,
   256^2 or 256^3: any change within one word, so any of one element of up to 4 bytes; two such
   elements of a block changed by equal or by opposite amounts: swapped, or their signs flipped.
4. Any other fault passes with a probability of 2^-61, over the choice of the keys; one confined to
   a block and made for it, 2^-32. So 64 bits are enough: of a trillion corrupted tensors one passes
   with a chance of one in two million. The keys are no secret: it tells faults, not forgeries.
5. On CPU and CUDA, for any number of threads, in this reference: one value.

Not differentiable: the result is an integer.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from megarl.ops._native import native_devices, runs_native
from megarl.ops._selfcheck import self_check

PRIME = (1 << 61) - 1
_BLOCK_WORDS = 1024
_WORD_KEY_SEED = int.from_bytes(b"megarl_C", "big")
_BLOCK_KEY_SEED = int.from_bytes(b"megarl_R", "big")
_BLOCK_BYTES = 4 * _BLOCK_WORDS
_SIZES = (1, 2, 4, 8)
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def digest(tensor: Tensor) -> str:
    """16 hex digits of a whole tensor: any dtype of 1, 2, 4 or 8 bytes, any shape and strides."""
    return finish(digest_partial(tensor), tensor.dtype, tensor.shape)


def digest_partial(
    tensor: Tensor,
    *,
    full_shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> Tensor:
    """What the slice `tensor`, at `offset` (per dimension) of a tensor of `full_shape`, adds to the
    whole one's digest: i64 [] in [0, p), on the tensor's device. Defaults: the whole tensor.

    RuntimeError for elements of another size, or a slice that is not inside `full_shape`.
    """
    full_shape = list(tensor.shape if full_shape is None else full_shape)
    offset = [0] * tensor.dim() if offset is None else list(offset)
    tensor = tensor.detach()
    if runs_native("digest_partial", tensor.device):
        out: Tensor = torch.ops.megarl.digest_partial(tensor, full_shape, offset)
        return out
    return digest_partial_ref(tensor, full_shape, offset)


def digest_copy_(place: Tensor, source: Tensor, *, read_back: bool = False) -> Tensor:
    """`place.copy_(source)`, both of one shape, and what `digest_partial` gives of the source as it
    is read: i64 [] on its device. Who has the copy can then prove that it is one.

    With `read_back` it is of the place instead, as it is after it was written. On a CPU each block
    is read back from the cache before the next is written: bytes that were not written, were
    written elsewhere or came out different show. That memory does not keep them does not.

    On a CPU contiguous tensors of one dtype take one pass, hardly slower than the copy alone.
    RuntimeError for another shape, or for elements of a size that cannot be digested.
    """
    place, source = place.detach(), source.detach()
    _check_copy(place, source)
    one_pass = (place.device, place.dtype) == (source.device, source.dtype)
    one_pass &= place.is_contiguous() and source.is_contiguous()
    if one_pass and runs_native("digest_copy_", source.device):
        out: Tensor = torch.ops.megarl.digest_copy_(place, source, read_back)
        return out
    return digest_copy_ref_(place, source, read_back)


def digest_copy_ref_(place: Tensor, source: Tensor, read_back: bool) -> Tensor:
    """The specification of `digest_copy_`, in two passes."""
    if read_back:
        return digest_partial(place.copy_(source))
    partial = digest_partial(source)
    place.copy_(source, non_blocking=True)
    return partial


def merge(partials: Iterable[Tensor | int]) -> int:
    """The partial digest of all slices together."""
    return sum(int(partial) for partial in partials) % PRIME


def finish(partial: Tensor | int, dtype: torch.dtype, shape: Sequence[int]) -> str:
    """The digest of the whole tensor, from the merged partials of all of it."""
    name = str(dtype).removeprefix("torch.")
    text = f"{name}|{list(shape)}|{int(partial):016x}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- the reference --------------------------------------------------------------------------------


def digest_partial_ref(tensor: Tensor, full_shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """The specification of `digest_partial`, in plain torch integers on any device."""
    _check(tensor, full_shape, offset)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    starts, run = _runs(tensor, full_shape, offset)
    if len(starts) == 1:
        return _contiguous(raw, starts[0])
    unit = math.gcd(4, run, *starts)  # bytes that need not be taken apart
    at = torch.arange(0, run, unit, device=tensor.device)
    many = max(_chunk_bytes(tensor.device) // run, 1)  # runs taken at a time
    for k in range(0, len(starts), many):
        begin = torch.tensor(starts[k : k + many], device=tensor.device)
        part = raw[k * run : (k + many) * run].view(_UNITS[unit])
        total = _add(total, _scattered(part, (begin[:, None] + at).reshape(-1), unit))
    return total


def _runs(
    tensor: Tensor, full_shape: Sequence[int], offset: Sequence[int]
) -> tuple[list[int], int]:
    """Where the stretches begin that are contiguous in the whole tensor, and how long they are: in
    bytes. A dimension that the slice has whole joins its stretch with the next.
    """
    stride = run = tensor.element_size()
    starts, joined = torch.zeros(1, dtype=torch.int64), True
    for size, full, start in zip(
        reversed(tensor.shape), reversed(full_shape), reversed(offset), strict=True
    ):
        if joined:
            run *= size
            starts = starts + start * stride
        else:
            at = (start + torch.arange(size)) * stride
            starts = (at[:, None] + starts).reshape(-1)
        joined = joined and size == full
        stride *= full
    return starts.tolist(), run


def _contiguous(raw: Tensor, start: int) -> Tensor:
    """Of bytes u8, the first of them byte `start` of the whole tensor."""
    end, chunk = start + raw.numel(), _chunk_bytes(raw.device)
    keys = _word_keys(raw.device)
    sums = []
    for low in range(start // chunk * chunk, end, chunk):
        part = raw[max(low - start, 0) : low + chunk - start]
        before = max(start - low, 0)
        pads = before, -(before + part.numel()) % _BLOCK_BYTES
        words = _words(part, pads) + _words(torch.ones_like(part), pads)
        # A product of a half word and a key has 49 bits, a block's sum 59.
        sums.append((((words & 0xFFFF) * keys).sum(-1), ((words >> 16) * keys).sum(-1)))
    lows, highs = zip(*sums, strict=True)
    first = start // chunk * chunk // _BLOCK_BYTES
    return _times_block_keys(torch.cat(lows), torch.cat(highs), first)


def _words(raw: Tensor, pads: tuple[int, int]) -> Tensor:
    """With zeros on both sides, which fill up the blocks: i64 [blocks, 1024]."""
    padded = torch.nn.functional.pad(raw, pads).view(torch.int32)
    return padded.view(-1, _BLOCK_WORDS).long() & 0xFFFFFFFF


def _scattered(values: Tensor, at: Tensor, unit: int) -> Tensor:
    """Of `values`, `unit` bytes each, value k at byte at[k] of the whole tensor."""
    mask = (1 << 8 * unit) - 1
    parts = ((values.long() & mask) + mask // 255) << (8 * (at & 3))
    word = at >> 2
    keys = _word_keys(values.device)[word & (_BLOCK_WORDS - 1)]
    block = word // _BLOCK_WORDS
    first = int(block.min())
    low = torch.zeros(int(block.max()) - first + 1, dtype=torch.int64, device=values.device)
    high = torch.zeros_like(low)
    low.index_add_(0, block - first, (parts & 0xFFFF) * keys)
    high.index_add_(0, block - first, (parts >> 16) * keys)
    return _times_block_keys(low, high, first)


def _times_block_keys(low: Tensor, high: Tensor, first_block: int) -> Tensor:
    """The sum over blocks from `first_block` on of R * (low + 2^16 high), modulo p."""
    sums = _add(_mod(low), _rotate(_mod(high), 16))
    products = _multiply(sums, _block_keys(first_block, low.numel(), low.device))
    # In halves, so that adding them up does not overflow.
    low_half, high_half = (products & 0x7FFFFFFF).sum(), (products >> 31).sum()
    return _add(_mod(low_half), _rotate(_mod(high_half), 31))


def _chunk_bytes(device: torch.device) -> int:
    """Whole blocks. On a CPU what the caches hold and one thread does alone; elsewhere what takes
    some 100 MB of memory on the way.
    """
    return (31 if device.type == "cpu" else 2048) * _BLOCK_BYTES


# Arithmetic modulo p = 2^61 - 1 on i64 in [0, p): multiplying by 2^n rotates the 61 bits by n.


def _mod(x: Tensor) -> Tensor:
    """Of an i64 that is not negative."""
    x = (x & PRIME) + (x >> 61)
    return torch.where(x >= PRIME, x - PRIME, x)


def _add(a: Tensor, b: Tensor) -> Tensor:
    return _mod(a + b)


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x & ((1 << (61 - bits)) - 1)) << bits) | (x >> (61 - bits))


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """In halves of 31 bits: every product stays below 2^62."""
    a0, a1, b0, b1 = a & 0x7FFFFFFF, a >> 31, b & 0x7FFFFFFF, b >> 31
    low, high = _mod(a0 * b0), _mod(2 * a1 * b1)  # 2^62 = 2
    return _add(_add(low, high), _rotate(_add(_mod(a0 * b1), _mod(a1 * b0)), 31))


@cache
def _word_keys(device: torch.device) -> Tensor:
    """C: i64 [1024]."""
    return (
        _splitmix64(_WORD_KEY_SEED + torch.arange(_BLOCK_WORDS, device=device)) >> 32 & 0xFFFFFFFF
    )


def _block_keys(first: int, count: int, device: torch.device) -> Tensor:
    """R of `count` blocks: i64 [count]."""
    blocks = first + torch.arange(count, device=device)
    return _shift_right(_splitmix64(_BLOCK_KEY_SEED + blocks), 3) % (PRIME - 1) + 1


def _splitmix64(x: Tensor) -> Tensor:
    """On the bits of i64, wrapping."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Zeros come in from the left, also for a negative x."""
    return x >> bits & ((1 << (64 - bits)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


# --- the compiled ops -----------------------------------------------------------------------------


def _check_size(op: str, tensor: Tensor) -> None:
    if tensor.element_size() not in _SIZES:
        raise RuntimeError(
            f"{op}: elements must have 1, 2, 4 or 8 bytes, "
            f"got {tensor.element_size()} ({tensor.dtype})"
        )


def _check_copy(place: Tensor, source: Tensor) -> None:
    _check_size("digest_copy_", place)
    _check_size("digest_copy_", source)
    if place.shape != source.shape:
        raise RuntimeError(
            f"digest_copy_: place must have the source's shape {list(source.shape)}, "
            f"got {list(place.shape)}"
        )


def _check(tensor: Tensor, full_shape: Sequence[int], offset: Sequence[int]) -> None:
    _check_size("digest_partial", tensor)
    if not len(full_shape) == len(offset) == tensor.dim():
        raise RuntimeError(
            f"digest_partial: full_shape and offset must have the tensor's {tensor.dim()} "
            f"dimension(s), got {len(full_shape)} and {len(offset)}"
        )
    for d, (size, full, start) in enumerate(zip(tensor.shape, full_shape, offset, strict=True)):
        if not 0 <= start <= full - size:
            raise RuntimeError(
                f"digest_partial: dimension {d} of the slice is {size} from {start} on, "
                f"which is not inside the whole tensor's {full}"
            )


def _fake(tensor: Tensor, full_shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    _check(tensor, full_shape, offset)
    return tensor.new_empty((), dtype=torch.int64)


def _fake_copy(place: Tensor, source: Tensor, read_back: bool) -> Tensor:
    _check_copy(place, source)
    return source.new_empty((), dtype=torch.int64)


if native_devices("digest_partial"):
    torch.library.register_fake("megarl::digest_partial", _fake)
if native_devices("digest_copy_"):
    torch.library.register_fake("megarl::digest_copy_", _fake_copy)


@self_check("digest_partial")
def _check_kernel(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.randint(0, 256, (3, 301, 47), dtype=torch.uint8, generator=generator)
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        whole = full[..., :40].contiguous().view(dtype)
        for part, offset in ((whole, [0, 0, 0]), (whole[:, 7:, 1:], [0, 7, 1])):
            shape = list(whole.shape)
            found = torch.ops.megarl.digest_partial(part.to(device), shape, offset)
            torch.testing.assert_close(
                found.cpu(), digest_partial_ref(part, shape, offset), rtol=0, atol=0
            )
