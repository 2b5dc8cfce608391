"""Routing comes back bit for bit, in few bits, and nothing that is no routing gets through."""

import base64
import binascii
import itertools
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.ops import routing_codec
from megarl.ops.routing_codec import CodecError, decode, encode, from_base64, narrow

HEADER = 32


def routing(tokens: int, layers: int, topk: int, experts: int, seed: int = 0) -> Any:
    """Different experts for every token, skewed towards some as a router's are."""
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(tokens, layers, experts)) + 1.5 * rng.standard_normal(
        (layers, experts)
    )
    return np.argsort(-scores, -1)[..., :topk].astype(np.int32)


@pytest.fixture(params=["kernel", "reference"])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both of what the codec may run on."""
    if request.param == "reference":
        monkeypatch.setattr(routing_codec, "host_function", lambda op, name: None)
    else:
        pytest.importorskip("megarl._host")
    return str(request.param)


SHAPES = [
    (0, 3, 2, 8),
    (1, 1, 1, 1),
    (5, 2, 1, 2),
    (17, 3, 3, 3),
    (40, 3, 8, 128),
    (9, 2, 8, 256),
    (9, 2, 8, 257),
    (30, 4, 10, 512),
    (3, 2, 4, 5000),
    (6, 0, 2, 8),
]


@pytest.mark.parametrize("deflate", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routing_comes_back(part: str, shape: tuple[int, int, int, int], deflate: bool) -> None:
    ids = routing(*shape)
    experts = shape[-1]
    back, count = decode(encode(ids, experts, deflate=deflate))
    assert count == experts
    assert back.dtype == (np.uint8 if experts <= 256 else np.uint16)
    assert back.shape == ids.shape and (back == ids).all()
    assert back.flags.c_contiguous and back.flags.writeable


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, np.uint64, np.int8])
def test_any_integers_in_any_layout_are_narrowed(part: str, dtype: Any) -> None:
    ids = routing(12, 3, 4, 100)
    laid_out = np.asfortranarray(np.repeat(ids, 2, 0))[::2].astype(dtype, order="A")
    found = narrow(laid_out, 100)
    assert found.dtype == np.uint8 and (found == ids).all()
    assert encode(laid_out, 100) == encode(ids, 100)


def test_without_a_number_of_experts_the_type_stays(part: str) -> None:
    ids = routing(7, 2, 2, 100)
    for dtype in (np.uint8, np.uint16):
        assert decode(encode(ids.astype(dtype)))[0].dtype == dtype
    assert decode(encode(np.zeros((0, 2, 2), np.uint16)))[0].dtype == np.uint16


def test_a_message_byte_for_byte(part: str) -> None:
    """5 experts take 3 bits, the lowest first: 4 1 | 0 3 is 100 001 000 011 from right to left."""
    payload = bytes([0b00_001_100, 0b0000_011_0])
    header = struct.pack("<4sBBBBIIHHQI", b"mgRT", 1, 0, 1, 0, 5, 2, 1, 2, 2, zlib.crc32(payload))
    message = encode(np.array([[[4, 1]], [[0, 3]]]), 5)
    assert message == header + payload
    assert len(header) == HEADER


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_and_reference_give_the_same_bytes(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megarl._host")
    ids = routing(*shape)
    native = [encode(ids, shape[-1], deflate=d) for d in (False, True)]
    monkeypatch.setattr(routing_codec, "host_function", lambda op, name: None)
    assert native == [encode(ids, shape[-1], deflate=d) for d in (False, True)]


def test_sizes_are_those_of_the_documentation() -> None:
    ids = routing(2000, 8, 8, 128)
    bits, deflated = encode(ids, 128), encode(ids, 128, deflate=True)
    assert len(bits) == HEADER + ids.size * 7 // 8
    assert len(deflated) < 0.93 * len(bits)
    uniform = np.random.default_rng(0).permuted(np.tile(np.arange(128), (500, 1)), axis=1)
    uniform = uniform[:, None, :8]
    assert encode(uniform, 128, deflate=True) == encode(uniform, 128)


# --- what is no routing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ((3, 1, 0), 8, "token 3, layer 1, choice 0: expert 8 of 8; accepted: .* 0 to 7"),
        ((0, 0, 2), -1, "token 0, layer 0, choice 2: expert -1 of 8"),
        ((5, 2, 1), 2**31 - 1, "token 5, layer 2, choice 1: expert 2147483647 of 8"),
        ((2, 0, 0), -(2**31), "token 2, layer 0, choice 0: expert -2147483648 of 8"),
    ],
)
def test_an_expert_that_is_not_there_is_named(
    part: str, at: tuple[int, int, int], value: int, message: str
) -> None:
    ids = routing(6, 3, 3, 8)
    ids[at] = value
    for call in (narrow, encode):
        with pytest.raises(CodecError, match=message):
            call(ids, 8)


@pytest.mark.parametrize(("first", "second"), [((3, 1, 0), (3, 1, 2)), ((0, 0, 0), (0, 0, 1)),
                                               ((5, 2, 1), (5, 2, 2))])  # fmt: skip
def test_an_expert_twice_in_a_token_is_named(
    part: str, first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    ids = routing(6, 3, 3, 8)
    ids[second] = ids[first]
    token, layer, k = second
    message = f"token {token}, layer {layer}, choice {k}: expert {ids[first]} a second time"
    with pytest.raises(CodecError, match=message):
        narrow(ids, 8)


def test_the_same_expert_in_another_token_or_layer_is_fine(part: str) -> None:
    ids = np.tile(np.array([3, 1], np.int32), (4, 5, 1))
    assert (decode(encode(ids, 4))[0] == ids).all()


@pytest.mark.parametrize(
    ("ids", "experts", "message"),
    [
        (np.zeros((2, 1), np.int32), 8, r"shape \[tokens, layers, experts\], got \(2, 1\)"),
        (np.zeros((2, 1, 1, 1), np.int32), 8, r"got \(2, 1, 1, 1\)"),
        (np.zeros((), np.int32), 8, r"got \(\)"),
        (np.zeros((2, 1, 1)), 8, "integers, got float64"),
        (np.zeros((2, 1, 1), bool), 8, "integers, got bool"),
        (np.zeros((2, 1, 1), object), 8, "integers, got object"),
        (np.zeros((2, 1, 1), np.int32), 0, "0 experts; accepted: 1 to 65536"),
        (np.zeros((2, 1, 1), np.int32), 65537, "65537 experts"),
        (np.zeros((2, 1, 1), np.int32), -3, "-3 experts"),
        (np.zeros((0, 70_000, 1), np.int32), 8, "too large"),
    ],
)
def test_arrays_of_another_kind_are_refused(
    part: str, ids: Any, experts: int, message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        narrow(ids, experts)


# --- damaged and hostile messages ----------------------------------------------------------------


def with_header(message: bytes, **changes: int) -> bytes:
    names = ("magic", "version", "method", "size", "zero", "experts", "tokens", "layers", "topk")
    names += ("length", "crc")
    layout = struct.Struct("<4sBBBBIIHHQI")
    fields = dict(zip(names, layout.unpack_from(message), strict=True)) | changes
    return layout.pack(*fields.values()) + message[HEADER:]


def with_payload(message: bytes, payload: bytes, **changes: int) -> bytes:
    numbers = {"length": len(payload), "crc": zlib.crc32(payload)} | changes
    return with_header(message[:HEADER] + payload, **numbers)


PLAIN = encode(routing(6, 3, 2, 8), 8)
SMALL = encode(routing(400, 3, 4, 300) // 16 * 16 + np.arange(4), 512, deflate=True)
DAMAGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "0 bytes"),
    "a part of a header": (lambda: PLAIN[:31], "31 bytes"),
    "another file": (lambda: b"PK\3\4" + PLAIN[4:], "begins with"),
    "a later version": (lambda: with_header(PLAIN, version=2), "version 2; accepted: 1"),
    "another method": (lambda: with_header(PLAIN, method=2), "method 2"),
    "something in the byte that is 0": (lambda: with_header(PLAIN, zero=1), "method 0, 1"),
    "no experts": (lambda: with_header(PLAIN, experts=0), "0 experts"),
    "too many experts": (lambda: with_header(PLAIN, experts=2**32 - 1), "4294967295 experts"),
    "another type": (lambda: with_header(PLAIN, size=2), "2 bytes an id of 8 experts"),
    "cut short": (lambda: PLAIN[:-1], "header says"),
    "a byte more": (lambda: PLAIN + b"\0", "header says"),
    "more tokens than there are": (lambda: with_header(PLAIN, tokens=7), "which take 16"),
    "as many as there can be": (
        lambda: with_header(PLAIN, tokens=2**32 - 1, layers=2**16 - 1, topk=2**16 - 1), "which take"
    ),
    "experts of fewer bits": (lambda: with_header(PLAIN, experts=4), "which take 9"),
    "a length beyond the end": (lambda: with_header(PLAIN, length=2**63), "header says"),
    "another bit": (lambda: PLAIN[:-1] + bytes([PLAIN[-1] ^ 1]), "CRC-32"),
    "an expert too many": (
        lambda: with_payload(with_header(PLAIN, experts=7), b"\xff" * 14), "expert 7 of 7"
    ),
    "one expert twice": (lambda: with_payload(PLAIN, bytes(14)), "a second time"),
    "no zlib": (lambda: with_payload(SMALL, b"\0" * 900), "does not inflate"),
    "zlib of too few": (lambda: with_payload(SMALL, zlib.compress(bytes(9599))), "not exactly"),
    "zlib of too many": (lambda: with_payload(SMALL, zlib.compress(bytes(9601))), "not exactly"),
    "zlib and more": (
        lambda: with_payload(SMALL, zlib.compress(bytes(9600)) + b"\0"), "not exactly"
    ),
    "zlib cut short": (lambda: with_payload(SMALL, SMALL[HEADER:-9]), "not exactly"),
    "a bomb": (lambda: with_payload(SMALL, zlib.compress(bytes(2**26))), "not exactly"),
    "a shape no zlib can fill": (
        lambda: with_header(SMALL, tokens=2**32 - 1, layers=2**16 - 1), "cannot become"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_an_error_that_says_what(part: str, name: str) -> None:
    make, message = DAMAGE[name]
    with pytest.raises(CodecError, match=message):
        decode(make())


def test_every_flipped_bit_is_found(part: str) -> None:
    for at, bit in itertools.product(range(len(PLAIN)), range(8)):
        damaged = bytearray(PLAIN)
        damaged[at] ^= 1 << bit
        with pytest.raises(CodecError):
            assert decode(bytes(damaged))[1] != 8  # more experts in as many bits are no damage
            raise CodecError


def survives(message: bytes) -> None:
    """An error, or routing that can be encoded again."""
    try:
        ids, experts = decode(message)
    except CodecError:
        return
    again, same = decode(encode(ids, experts))
    assert same == experts and (again == ids).all()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes(raw: bytes) -> None:
    survives(raw)
    survives(PLAIN[:HEADER] + raw)
    survives(with_payload(PLAIN, raw))
    survives(with_payload(SMALL, raw))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), message=st.sampled_from([PLAIN, SMALL]))
def test_headers_with_other_numbers_and_a_payload_that_fits_its_checksum(
    data: st.DataObject, message: bytes
) -> None:
    """As a hostile sender would write them, not as accidents do."""
    small, word = st.integers(0, 255), st.integers(0, 2**16 - 1)
    fields = {"version": small, "method": st.integers(0, 2), "size": st.integers(0, 3)}
    fields |= {"experts": st.integers(0, 2**17), "tokens": st.integers(0, 2**32 - 1)}
    fields |= {"layers": word, "topk": word, "length": st.integers(0, 2**64 - 1)}
    chosen = data.draw(st.sets(st.sampled_from(sorted(fields)), max_size=3))
    changes = {name: data.draw(fields[name]) for name in chosen}
    payload = bytearray(message[HEADER:])
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(small)
    survives(with_payload(message, bytes(payload), **changes))


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(0, 30),
    layers=st.integers(0, 4),
    topk=st.integers(1, 4),
    experts=st.sampled_from([4, 5, 17, 256, 300, 1025]),
    deflate=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_routing_comes_back(
    tokens: int, layers: int, topk: int, experts: int, deflate: bool, seed: int
) -> None:
    ids = routing(tokens, layers, topk, experts, seed)
    back, count = decode(encode(ids, experts, deflate=deflate))
    assert count == experts and (back == ids).all()


def test_the_kernel_refuses_by_itself_what_it_could_not_survive() -> None:
    host = pytest.importorskip("megarl._host")
    ids = np.zeros(8, np.uint8)
    for call in (
        lambda: host.unpack_ids(b"123", 7, ids),
        lambda: host.unpack_ids(b"1234567", 9, ids),
        lambda: host.unpack_ids(b"", -1, ids),
        lambda: host.pack_ids(ids, 9),
        lambda: host.find_bad_id(ids, 0, 4),
    ):
        with pytest.raises(ValueError, match=r"routing|find_bad_id"):
            call()
    for wrong in (np.zeros(8), np.zeros(16, np.uint8)[::2], np.zeros(8, np.int64)):
        with pytest.raises(TypeError):
            host.pack_ids(wrong, 3)


# --- base64, as servers send it -------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 384, 1001])
@pytest.mark.parametrize("view", [bytes, memoryview])
def test_numbers_come_out_of_base64(part: str, count: int, view: Any) -> None:
    """All lengths of padding, negative and large numbers, every character."""
    ids = np.random.default_rng(count).integers(-(2**31), 2**31, count).astype("<i4")
    text = base64.b64encode(ids.tobytes())
    found = from_base64(view(text))
    assert found.dtype == np.int32 and found.tolist() == ids.tolist()


BAD_BASE64 = [
    b"AAA",  # no four characters
    b"AAAA",  # three bytes, which are no int32
    b"AAAAA===",
    b"A=======",
    b"====",
    b"AAAAAA==AAAAAA==",  # padding in the middle
    b"AA==AAAAAA==",
    b"AAAAAAA=",  # five bytes
    b"AAAAAA=A",
    b"AAAA\nAA==",
    b"AAAAAA=\n",
    b"AAA AA==",
    b"AAA-AA==",  # another alphabet
    b"AAA_AA==",
    b"AAA\x00AA==",
    b"AAA\xffAA==",
    b"\x80AAAAA==",
]


@pytest.mark.parametrize("text", BAD_BASE64, ids=repr)
def test_what_is_no_base64_of_numbers_is_refused(part: str, text: bytes) -> None:
    with pytest.raises(CodecError, match="are no base64 of int32"):
        from_base64(text)


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=40),
        st.text("AQgw+/=\n-", max_size=24).map(str.encode),
        st.binary(max_size=30).map(lambda b: base64.b64encode(b)),
    )
)
def test_pythons_own_strict_mode_takes_and_refuses_the_same(text: bytes) -> None:
    expected: Any
    try:
        raw = base64.b64decode(text, validate=True)
        expected = None if len(raw) % 4 else list(struct.unpack(f"<{len(raw) // 4}i", raw))
    except binascii.Error:
        expected = None
    try:
        found = from_base64(text).tolist()
    except CodecError:
        found = None
    assert found == expected
