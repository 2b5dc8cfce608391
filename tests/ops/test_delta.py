"""Deltas: kernel and reference against bytes written by hand, and against a decoder in Python
integers. Payloads that were spoilt: ``test_delta_faults.py``.
"""

import sys
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops import _native, delta_apply_, delta_apply_ref_, delta_encode_, delta_encode_ref_
from tests.ops.delta_calls import (
    HERE,
    appliers,
    changed,
    encoders,
    kernel_and_reference,
    native_apply,
    native_encode,
    needs_native,
    payload_of,
    plain_apply,
    raw,
)
from tests.ops.plain_delta import DTYPES, decode, patterns, some_bits, updated

# --- bytes written by hand ------------------------------------------------------------------------

NIBBLES = {3: 0xFF, 4: 0x07, 9: 0xF8}  # -1, 7, -8
EVERY_SECOND = {i: 1 for i in range(0, 256, 2)}
ALL = {i: 2 for i in range(256)}
BY_HAND = [
    # (item, elements, changes, payload)
    (2, 300, {}, ""),
    (2, 300, {5: 0x0102}, "0500 0100 05 0201"),  # -> table, codes, places, values
    (2, 300, {5: 0x7F, 299: 0xFF80}, "0600 8181 052b 7f80"),
    (2, 300, {5: 0x80, 299: 0xFF7F}, "0800 0101 052b 8000 7fff"),
    (2, 300, {299: 0x1234, 5: 1}, "0700 8101 052b 01 3412"),
    (4, 256, {0: 300, 255: 0xFFFFFFFF}, "0700 82 00ff 2c01 ffff"),
    (4, 256, {7: 0x8000}, "0600 01 07 00800000"),
    (1, 256, NIBBLES, "0600 83 030409 7f08"),
    (1, 256, {0: 8, 1: 1}, "0500 02 0001 0801"),
    (1, 256, EVERY_SECOND, "6100 a0" + "55" * 32 + "11" * 64),
    (2, 256, {i: 1 for i in range(31)}, "3f00 9f" + bytes(range(31)).hex() + "01" * 31),
    (2, 256, {i: 1 for i in range(32)}, "4100 a0" + "ff" * 4 + "00" * 28 + "01" * 32),
    (2, 256, ALL, "0101 a1" + "02" * 256),
    (1, 259, {256: 1, 257: 2, 258: 3}, "0400 00a1 2103"),  # all of the last block
    (1, 270, {256: 9, 266: 1, 269: 1}, "0700 0020 0124 090101"),  # 2 bytes for its 14 elements
    (1, 270, {269: 1}, "0400 0081 0d 01"),
    (2, 8200, {4096: 1}, "0000 1200 0000 81" + "00" * 15 + "00 01"),  # the chunk in the middle
    (2, 2, {0: 1}, "01000000"),  # 5 bytes by its change: whole
    (1, 5, {0: 1}, "0100000000"),
    (4, 256, {i: 1 << 16 for i in range(256)}, "00000100" * 256),
    (1, 0, {}, ""),
]


@encoders
@pytest.mark.parametrize(("item", "numel", "changes", "payload"), BY_HAND)
def test_a_payload_is_these_bytes(encode, item, numel, changes, payload):
    base, new = changed(item, numel, changes)
    assert raw(encode(base, new)).hex() == payload.replace(" ", "")
    assert torch.equal(base, new)


@appliers
@pytest.mark.parametrize(("item", "numel", "changes", "payload"), BY_HAND)
def test_these_bytes_make_the_change(apply, item, numel, changes, payload):
    base, new = changed(item, numel, changes)
    apply(base, payload_of(bytes.fromhex(payload)))
    assert torch.equal(base, new)


@encoders
@appliers
def test_bits_count_and_not_values(encode, apply):
    old = torch.tensor([0.0, 1.0, float("nan"), 5.0] * 64)
    bits = old.view(torch.int32).clone()
    bits[0::4] = -(2**31)  # -0.0, which equals 0.0
    bits[2::4] += 1  # another NaN
    new = bits.view(torch.float32)
    base, copy = old.clone(), old.clone()
    payload = encode(base, new)
    assert 0 < payload.numel() < new.nbytes  # neither unchanged nor all of it
    assert raw(base) == raw(new)
    apply(copy, payload)
    assert raw(copy) == raw(new)
    same = old.clone()
    assert encode(same, old).numel() == 0  # NaN is not itself, its bits are


# --- any change -----------------------------------------------------------------------------------

numels = st.one_of(
    st.sampled_from([0, 1, 2, 255, 256, 257, 4095, 4096, 4097, 9000]),
    st.integers(31, 65),
    st.integers(0, 1200),
)


@needs_native
@settings(max_examples=120, deadline=None)
@given(
    numels,
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 0.004, 0.05, 0.13, 0.5, 1.0]),
    st.sampled_from([1, 7, 120, 30_000, 1 << 30]),
    st.integers(0, 2**20),
)
def test_kernel_reference_and_definition_agree_on_any_update(numel, dtype, share, most, seed):
    generator = torch.Generator().manual_seed(seed)
    old = some_bits(numel, dtype, generator)
    new = updated(old, share, most, generator)
    base, reference_base = old.clone(), old.clone()
    payload = native_encode(base, new)
    assert raw(payload) == raw(delta_encode_ref_(reference_base, new))
    assert raw(base) == raw(reference_base) == raw(new)
    assert payload.numel() <= new.nbytes
    assert decode(patterns(old), dtype.itemsize, raw(payload)) == patterns(new)
    for apply in HERE:
        copy = old.clone()
        apply(copy, payload)
        assert raw(copy) == raw(new)


@encoders
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_nothing_can_shorten_goes_whole_and_nothing_is_longer(encode, dtype):
    generator = torch.Generator().manual_seed(0)
    for numel in (1, 2, 3, 5, 40, 300, 5000):
        old, new = (some_bits(numel, dtype, generator) for _ in range(2))
        new.view(torch.uint8).copy_(old.view(torch.uint8) ^ 0x88)  # every byte, by a wide step
        payload = encode(old.clone(), new)
        assert raw(payload) == raw(new)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_thread_count_changes_nothing(dtype):
    generator = torch.Generator().manual_seed(0)
    old = some_bits(600_003, dtype, generator)  # several threads' parts, the last one short
    new = updated(old, 0.03, 3, generator)
    before = torch.get_num_threads()
    payloads = []
    try:
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            base, copy = old.clone(), old.clone()
            payloads.append(native_encode(base, new))
            native_apply(copy, payloads[-1])
            assert raw(base) == raw(copy) == raw(new)
    finally:
        torch.set_num_threads(before)
    reference = raw(delta_encode_ref_(old.clone(), new))
    assert all(raw(payload) == reference for payload in payloads)
    for apply in (delta_apply_ref_, plain_apply):
        copy = old.clone()
        apply(copy, payloads[0])
        assert raw(copy) == raw(new)


# --- the ops --------------------------------------------------------------------------------------


@encoders
@pytest.mark.parametrize(
    ("base", "new", "message"),
    [
        (torch.zeros(2, dtype=torch.float64), torch.zeros(2), "of 1, 2 or 4 bytes, got 8"),
        (torch.zeros(4, 4).t(), torch.zeros(4, 4), "base must be contiguous"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), "base's dtype, .*, got .*"),
        (torch.zeros(2, 3), torch.zeros(3, 2), r"base's shape, \[2, 3\], got \[3, 2\]"),
        (torch.zeros(()), torch.zeros(1), r"base's shape, \[\], got \[1\]"),
    ],
)
def test_tensors_that_are_no_two_versions_are_refused(encode, base, new, message):
    with pytest.raises(RuntimeError, match=f"delta_encode_: .*{message}"):
        encode(base, new)


@kernel_and_reference
@pytest.mark.parametrize(
    ("base", "payload", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.zeros(2).byte(), "1, 2 or 4 bytes, got 8"),
        (torch.zeros(4, 4).t(), torch.zeros(2).byte(), "base must be contiguous"),
        (torch.zeros(2), torch.zeros(2), "payload must be uint8, got"),
        (torch.zeros(2), torch.zeros(2, 1).byte(), "payload must have 1 dimension.s., got 2"),
    ],
)
def test_arguments_of_another_kind_are_refused(apply, base, payload, message):
    with pytest.raises(RuntimeError, match=f"delta_apply_: .*{message}"):
        apply(base, payload)


@encoders
@appliers
def test_strided_tensors_and_payloads_that_begin_anywhere(encode, apply):
    generator = torch.Generator().manual_seed(0)
    old = some_bits(60 * 70, torch.float32, generator).view(60, 70)
    new = updated(old, 0.1, 1000, generator)
    payload = encode(old.clone(), new.t().contiguous().t())
    assert raw(payload) == raw(encode(old.clone(), new))
    for start in range(4):
        room = torch.zeros(start + payload.numel(), dtype=torch.uint8)
        room[start:] = payload
        copy = old.clone()
        apply(copy, room[start:])
        assert raw(copy) == raw(new)
        whole = torch.cat([room[:start], new.view(-1).view(torch.uint8)])
        apply(copy.zero_(), whole[start:])
        assert raw(copy) == raw(new)


@needs_native
def test_opcheck():
    old, new = changed(2, 700, {1: 1, 500: 7})
    ops = torch.ops.megarl
    torch.library.opcheck(ops.delta_encode_, (old.clone(), new))
    payload = delta_encode_ref_(old.clone(), new)
    torch.library.opcheck(ops.delta_apply_, (old.clone(), payload))


@needs_native
def test_the_public_functions_run_the_kernels(monkeypatch):
    def refuse(*_: object) -> Tensor:
        raise AssertionError("a reference ran although the kernels are loaded")

    module = sys.modules["megarl.ops.delta"]
    monkeypatch.setattr(module, "delta_encode_ref_", refuse)
    monkeypatch.setattr(module, "delta_apply_ref_", refuse)
    base = torch.zeros(300, requires_grad=True)
    payload = delta_encode_(base, torch.ones(300))
    copy = torch.zeros(300)
    delta_apply_(copy, payload)
    assert torch.equal(base.detach(), torch.ones(300)) and torch.equal(copy, torch.ones(300))


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the reference would pass the tests below.
    assert "cuda" in _native.native_devices("delta_encode_"), "the CUDA kernel is not built"
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_equals_the_cpu(cuda, dtype):
    generator = torch.Generator().manual_seed(0)
    for numel, share, most in product(
        (1, 60, 4500, 1_100_003), (0.0, 0.01, 0.2, 1.0), (1, 100, 1 << 30)
    ):
        old = some_bits(numel, dtype, generator)
        new = updated(old, share, most, generator)
        base, copy = old.to(cuda), old.to(cuda)
        payload = delta_encode_(base, new.to(cuda))
        assert raw(payload.cpu()) == raw(delta_encode_ref_(old.clone(), new))
        delta_apply_(copy, torch.cat([payload[:1], payload])[1:])  # at an odd address
        assert raw(base.cpu()) == raw(copy.cpu()) == raw(new)
