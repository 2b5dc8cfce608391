"""digest: the faults of transport and sharding that it must find."""

import random
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor

from megarl.ops import digest, digest_partial, merge
from tests.ops.plain_digest import WORD_KEYS, P, block_key, raw, some


def swapped(t: Tensor, i: int, j: int) -> Tensor:
    order = torch.arange(t.shape[0])
    order[[i, j]] = order[[j, i]]
    return t[order]


def flipped(t: Tensor, *at: int) -> Tensor:
    """Signs of those elements."""
    t = t.clone()
    t.view(-1)[list(at)] *= -1
    return t


def zeroed(t: Tensor, start: int, end: int) -> Tensor:
    t = t.clone()
    t[start:end] = 0
    return t


def bytes_swapped(t: Tensor, at: int) -> Tensor:
    t = t.clone()
    element = t.view(-1)[at : at + 1].view(torch.uint8)
    element.copy_(element.flip(0))
    return t


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "neighbouring rows swapped": lambda t: swapped(t, 40, 41),
    "far rows swapped": lambda t: swapped(t, 0, 95),
    "columns swapped": lambda t: swapped(t.t(), 0, 1).t(),
    "halves swapped": lambda t: t.roll(48, 0),
    "shifted by one element": lambda t: t.reshape(-1).roll(1).reshape(t.shape),
    "shifted by one row": lambda t: t.roll(1, 0),
    "shifted by a block of the digest": lambda t: t.reshape(-1).roll(2048).reshape(t.shape),
    "a block of rows shifted by one element": lambda t: torch.cat(
        [t[:32], t[32:64].reshape(-1).roll(1).reshape(32, -1), t[64:]]
    ),
    "transposed": lambda t: t.reshape(t.shape[::-1]).t().contiguous().reshape(t.shape),
    "a shard of zeros": lambda t: zeroed(t, 24, 48),
    "a shard from another place": lambda t: torch.cat([t[:24], t[:24], t[48:]]),
    "a stale row": lambda t: torch.cat([t[:7], t[7:8] * 1.01, t[8:]]),
    "one bit": lambda t: flipped(t, 4321),
    "two neighbouring signs": lambda t: flipped(t, 10, 11),
    "two signs a word apart": lambda t: flipped(t, 10, 12),
    "two signs a block apart": lambda t: flipped(t, 10, 10 + 1024),
    "four signs": lambda t: flipped(t, 1, 2, 3, 4),
    "all signs": lambda t: -t,
    "bytes of one element": lambda t: bytes_swapped(t, 77),
    "bytes of all": lambda t: (
        t.view(torch.uint8)
        .reshape(-1, t.element_size())
        .flip(1)
        .contiguous()
        .view(t.dtype)
        .reshape(t.shape)
    ),
    "all zeros": torch.zeros_like,
    "reversed": lambda t: t.flip(0, 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("fault", FAULTS)
def test_structured_faults_are_found(fault, dtype):
    for seed in range(5):
        tensor = torch.randn(96, 112, generator=torch.Generator().manual_seed(seed)).to(dtype)
        faulty = FAULTS[fault](tensor).reshape(tensor.shape)
        assert raw(faulty) != raw(tensor)
        assert digest(faulty) != digest(tensor)


def test_the_guarantees_hold_for_these_keys():
    """Two elements of a block, changed by d and e with |d| = |e| < 2^32: the change is d times the
    sum or the difference of their bytes' keys. That is not 0 modulo p, nor is the product, p being
    prime."""
    byte_keys = {256**k * key for k in range(4) for key in WORD_KEYS}
    assert len(byte_keys) == 4096
    assert min(byte_keys) > 0 and 2 * max(byte_keys) < P
    assert all(1 <= block_key(h) < P for h in [*range(1000), 2**40])
    s = 4
    for _ in range(59):  # Lucas-Lehmer: 2^61 - 1 is prime
        s = (s * s - 2) % P
    assert s == 0


def test_two_swapped_elements_are_found_wherever_they_are():
    tensor = some((1 << 15,), torch.bfloat16, 3)
    expected = digest(tensor)
    rng = random.Random(0)
    for _ in range(300):
        i, j = rng.sample(range(tensor.numel()), 2)
        changed = swapped(tensor.view(torch.int16), i, j).view(torch.bfloat16)
        assert (digest(changed) == expected) == (raw(changed) == raw(tensor))


def test_every_single_bit_counts():
    tensor = some((37,), torch.bfloat16)
    words = tensor.view(torch.int16)
    seen = {digest(tensor)}
    for k in range(37):
        for bit in range(16):
            changed = words.clone()
            changed[k] ^= torch.tensor(1 << bit).to(torch.int16)
            seen.add(digest(changed.view(torch.bfloat16)))
    assert len(seen) == 1 + 37 * 16


def test_all_pairs_of_sign_flips_differ():
    tensor = torch.ones(64)
    found = {digest(flipped(tensor, i, j)) for i, j in combinations(range(64), 2)}
    assert len(found) == 64 * 63 // 2


def test_zeros_of_another_sign_shape_or_dtype_differ():
    zeros = torch.zeros(2, 6)
    others = [-zeros, zeros.reshape(3, 4), zeros.reshape(12), zeros.int(), zeros.bfloat16()]
    others += [torch.zeros(6, 2), torch.zeros(2, 7), torch.zeros(0, 6), torch.zeros(6, 0)]
    others += [torch.zeros(()), torch.zeros(1)]
    assert len({digest(t) for t in [zeros, *others]}) == 1 + len(others)


def test_nan_payloads_count():
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert quiet.isnan().all()
    assert digest(quiet[:1]) != digest(quiet[1:])


def test_a_shard_of_zeros_that_is_missing_or_comes_twice_is_found():
    tensor = torch.zeros(8, 16)
    halves = [
        digest_partial(tensor[k : k + 4], full_shape=tensor.shape, offset=[k, 0]) for k in (0, 4)
    ]
    whole = int(digest_partial(tensor))
    assert merge(halves) == whole
    assert merge(halves[:1]) != whole
    assert merge([halves[0], halves[0]]) != whole
    assert merge([*halves, halves[1]]) != whole


def test_a_shard_at_a_wrong_offset_is_found():
    tensor = some((8, 16), torch.bfloat16)
    right = digest_partial(tensor[4:], full_shape=(8, 16), offset=(4, 0))
    assert int(right) != int(digest_partial(tensor[4:], full_shape=(8, 16), offset=(3, 0)))
    assert int(right) != int(digest_partial(tensor[4:], full_shape=(8, 17), offset=(4, 0)))
