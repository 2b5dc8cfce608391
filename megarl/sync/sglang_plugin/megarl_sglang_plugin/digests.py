"""The digest of a tensor: that of `megarl.ops.digest`, which says what it finds and with what
certainty, of dtype, shape and bytes. Where megarl is installed, its compiled operator computes it;
`torch_partial` is the same sum in plain torch: a dozen passes, and 100 MB of memory on the way.
"""

import contextlib
import hashlib
from collections.abc import Callable
from functools import cache

import torch

_digest_partial: Callable[[torch.Tensor], torch.Tensor] | None = None
with contextlib.suppress(ImportError):
    from megarl.ops import digest_partial as _digest_partial

_PRIME = (1 << 61) - 1
_BLOCK_WORDS = 1024
_WORD_KEY_SEED = int.from_bytes(b"megarl_C", "big")
_BLOCK_KEY_SEED = int.from_bytes(b"megarl_R", "big")


def tensor_digest(tensor: torch.Tensor) -> str:
    """The first 16 hex digits of sha256 over `dtype|shape|partial`, the partial digest in 16."""
    return finish(partial(tensor), tensor)


def partial(tensor: torch.Tensor) -> torch.Tensor:
    """Queued on the tensor's device: i64 []. Not waited for."""
    return (_digest_partial or torch_partial)(tensor.detach())


def finish(partial: torch.Tensor, tensor: torch.Tensor) -> str:
    """Waits for the partial digest, which is of this tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{dtype}|{list(tensor.shape)}|{int(partial):016x}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.no_grad()
def torch_partial(tensor: torch.Tensor) -> torch.Tensor:
    """Of the tensor's bytes, row-major: i64 [] on its device.

    Word w is bytes 4w..4w+3, little-endian; sums are modulo p = 2^61 - 1:

        sum over the bytes g, w = g div 4:
            (byte + 1) * 256^(g mod 4) * C[w mod 1024] * R(w div 1024)
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    keys = _word_keys(raw.device)
    sums = []
    for part in raw.split((32 if raw.device.type == "cpu" else 2048) * 4 * _BLOCK_WORDS):
        words = _words(part) + _words(torch.ones_like(part))
        # A product of a half word and a key has 49 bits, a block's sum 59.
        sums.append((((words & 0xFFFF) * keys).sum(-1), ((words >> 16) * keys).sum(-1)))
    low, high = (torch.cat(halves) for halves in zip(*sums, strict=True))
    blocks = torch.arange(low.numel(), device=raw.device)
    block_keys = (_splitmix64(_BLOCK_KEY_SEED + blocks) >> 3 & _PRIME) % (_PRIME - 1) + 1
    products = _multiply(_mod(_mod(low) + _rotate(_mod(high), 16)), block_keys)
    # In halves, so that adding them up does not overflow.
    low, high = (products & 0x7FFFFFFF).sum(), (products >> 31).sum()
    return _mod(_mod(low) + _rotate(_mod(high), 31))


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Filled up with zeros to whole blocks: i64 [blocks, 1024]."""
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % (4 * _BLOCK_WORDS)))
    return padded.view(torch.int32).view(-1, _BLOCK_WORDS).long() & 0xFFFFFFFF


def _mod(x: torch.Tensor) -> torch.Tensor:
    x = (x & _PRIME) + (x >> 61)
    return torch.where(x >= _PRIME, x - _PRIME, x)


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Times 2^bits, modulo p."""
    return ((x & ((1 << (61 - bits)) - 1)) << bits) | (x >> (61 - bits))


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In halves of 31 bits: every product stays below 2^62. And 2^62 is 2."""
    a0, a1, b0, b1 = a & 0x7FFFFFFF, a >> 31, b & 0x7FFFFFFF, b >> 31
    middle = _mod(_mod(a0 * b1) + _mod(a1 * b0))
    return _mod(_mod(_mod(a0 * b0) + _mod(2 * a1 * b1)) + _rotate(middle, 31))


@cache
def _word_keys(device: torch.device) -> torch.Tensor:
    words = torch.arange(_BLOCK_WORDS, device=device)
    return _splitmix64(_WORD_KEY_SEED + words) >> 32 & 0xFFFFFFFF


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """On the bits of i64: additions and products wrap, zeros are shifted in."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ (x >> 30 & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ (x >> 27 & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return x ^ (x >> 31 & ((1 << 33) - 1))
