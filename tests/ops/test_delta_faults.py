"""Deltas that came wrong: what does not add up is refused before anything is written, whatever was
done to it, by every implementation; and what does add up means the same to all of them.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops import _native, delta_apply_, delta_encode_ref_
from tests.ops.delta_calls import (
    HERE,
    Apply,
    appliers,
    changed,
    kernel_and_reference,
    payload_of,
    raw,
)
from tests.ops.plain_delta import Damaged, decode, patterns, some_bits, updated


def outcome(apply: Apply, old: Tensor, payload: bytes) -> bytes | None:
    """What becomes of ``old``; None where it is refused, and then nothing may."""
    base = old.clone()
    try:
        apply(base, payload_of(payload))
    except (RuntimeError, ValueError):
        assert raw(base) == raw(old)
        return None
    return raw(base)


def defined_outcome(old: Tensor, payload: bytes) -> bytes | None:
    item = old.element_size()
    try:
        new = decode(patterns(old), item, payload)
    except Damaged:
        return None
    return b"".join(pattern.to_bytes(item, "little") for pattern in new)


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[Tensor, bytes]:
    """A tensor and a payload for it in which something is wrong."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]))
    old = some_bits(draw(st.sampled_from([60, 300, 700, 4500])), dtype, generator)
    share = draw(st.sampled_from([0.01, 0.1, 0.3, 1.0]))
    new = updated(old, share, draw(st.sampled_from([1, 100])), generator)
    payload = bytearray(raw(delta_encode_ref_(old.clone(), new)))
    for _ in range(draw(st.integers(1, 3))):
        how = draw(st.sampled_from(["byte", "head", "cut", "more", "insert"]))
        at = draw(st.integers(0, max(len(payload) - 1, 0)))
        byte = draw(st.sampled_from([0, 1, 31, 32, 33, 34, 128, 129, 160, 161, 162, 255]))
        if how in ("byte", "head") and payload:
            payload[at % 24 % len(payload) if how == "head" else at] = byte
        elif how == "cut":
            del payload[at:]
        elif how == "more":
            payload += bytes([byte])
        elif how == "insert":
            payload.insert(at, byte)
    return old, bytes(payload)


@settings(max_examples=250, deadline=None)
@given(spoilt())
def test_a_spoilt_payload_is_refused_by_all_or_means_the_same_to_all(case):
    old, payload = case
    expected = defined_outcome(old, payload)
    for apply in HERE:
        assert outcome(apply, old, payload) == expected


@appliers
def test_every_cut_and_every_byte_too_many_is_refused(apply):
    old, new = changed(2, 600, {3: 1, 70: 2, 300: 999, 599: 1})
    payload = raw(delta_encode_ref_(old.clone(), new))
    for length in range(1, len(payload)):
        assert outcome(apply, old, payload[:length]) is None
    for more in (1, 2, 40):
        assert outcome(apply, old, payload + bytes(more)) is None


DAMAGED = [
    # (elements of 2 bytes, payload)
    (256, "0100 22"),  # no such kind
    (256, "0200 a2 00"),
    (256, "0100 ff"),
    (256, "0100 80"),  # a step of nothing
    (256, "0200 80 00"),
    (256, "0500 82 0303 0101"),  # a place twice
    (256, "0400 82 0303 01"),
    (256, "0500 82 0201 0101"),  # places in disorder
    (300, "0500 8100 ff 01 00"),
    (300, "0400 0081 2c 01"),  # the last block has 44 elements
    (300, "0400 0081 ff 01"),
    (270, "0600 00a0 0140 0101"),  # a bit for the 15th of 14 elements
    (256, "0300 82 00"),  # its places are not all there
    (256, "0400 82 0001 01"),  # nor are its values
    (256, "0600 82 0001 010101"),  # one more than that
    (256, "2300 a0" + "00" * 32 + "01 01"),  # values of no element
    (256, "0100 00 00"),  # more than the table says
    (256, "0300 8105"),  # less
    (5000, "0300 0000 818181"),  # fewer bytes than blocks
    (5000, "1300 0000 81" + "00" * 15 + "05 01 00"),  # of two chunks, bytes behind a change
]


@appliers
@pytest.mark.parametrize(("numel", "payload"), DAMAGED)
def test_what_does_not_add_up_is_refused(apply, numel, payload):
    old = torch.zeros(numel, dtype=torch.bfloat16)
    assert defined_outcome(old, bytes.fromhex(payload)) is None
    assert outcome(apply, old, bytes.fromhex(payload)) is None


@appliers
def test_the_first_element_stays_where_the_last_chunk_is_damaged(apply):
    """Of more chunks than are read at a time, or than a thread takes."""
    numel = 600 * 4096
    old, new = changed(1, numel, {0: 1, 300 * 4096: 1, numel - 1: 1})
    payload = delta_encode_ref_(old.clone(), new)
    payload[-2] = 0  # the last place, 255: fine, and another element
    apply(old.clone(), payload)
    payload[-18] = 200  # the code of the last chunk's first block
    copy = old.clone()
    with pytest.raises((RuntimeError, ValueError)):
        apply(copy, payload)
    assert not copy.any()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("0300", "payload has 0 bytes behind its table, which says 3"),
        ("02", "payload must have at least the 2 bytes of its table, got 1"),
        ("00" * 600, r"payload must have at most the 512 bytes of the tensor, got 600"),
        ("0100 22", "chunk 0 of the payload has a code that is none"),
        ("0200 80 00", "chunk 0 of the payload has a code that is none"),
        ("0200 82 00", "chunk 0 of the payload has another length than its codes say"),
        ("0400 82 0001 01", "chunk 0 of the payload has another length"),
        ("0600 82 0001 010101", "chunk 0 of the payload has another length"),
        ("0500 82 0101 0101", "chunk 0 of the payload has places that are out of order, or beyond"),
        ("0500 82 0201 0101", "chunk 0 of the payload has places that are out of order, or beyond"),
    ],
)
@kernel_and_reference
def test_a_spoilt_payload_is_told_with_what_was_found(apply, payload, message):
    base = torch.zeros(256, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=f"delta_apply_: .*{message}"):
        apply(base, payload_of(bytes.fromhex(payload)))
    assert not base.any()


@kernel_and_reference
@pytest.mark.parametrize(
    ("table", "chunk"), [("0300 0500 0000", 0), ("0000 0500 0300", 1), ("0000 1000 0200", 2)]
)
def test_the_first_chunk_that_is_wrong_is_named(apply, table, chunk):
    """Of 16, 16 and 1 blocks in which nothing changed: fewer bytes than blocks, or more."""
    rest = bytes(sum(bytes.fromhex(table)[::2]))
    base = torch.zeros(8200, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=f"chunk {chunk} of the payload has another length"):
        apply(base, payload_of(bytes.fromhex(table) + rest))


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the reference would pass the tests below.
    assert "cuda" in _native.native_devices("delta_encode_"), "the CUDA kernel is not built"
    return torch.device("cuda")


@pytest.mark.gpu
def test_cuda_refuses_a_spoilt_payload_and_goes_on(cuda):
    old, new = changed(2, 5000, {3: 1, 4500: 999})
    payload = delta_encode_ref_(old.clone(), new).to(cuda)
    base = old.to(cuda)
    for at in range(payload.numel()):
        spoilt = payload.clone()
        spoilt[at] ^= 0x22
        expected = defined_outcome(old, raw(spoilt.cpu()))
        if expected is None:
            with pytest.raises(RuntimeError, match="delta_apply_: "):
                delta_apply_(base, spoilt)
            assert raw(base.cpu()) == raw(old)
    delta_apply_(base, payload)
    assert raw(base.cpu()) == raw(new)
