"""Pushes of what changed, between a sender's base and servers that hold tensors: no network."""

import json
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.errors import SyncError
from megarl.ops import digest
from megarl.protocols import Bucket
from megarl.sync.delta import (
    HEADER,
    PAYLOADS,
    Base,
    changes,
    decode,
    deltas_of,
    held_by_all,
    is_sealed,
    seal,
    unseal,
    wire_spec,
    with_deltas,
)
from megarl.sync.stream import Piece, laid_flat, push_digest
from megarl.types import Delta, TensorSpec
from tests.ops.plain_delta import some_bits, updated

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64]


def tensor_of(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return some_bits(numel, dtype, torch.Generator().manual_seed(seed))


def step_of(tensor: Tensor, seed: int = 1, share: float = 0.02) -> Tensor:
    return updated(tensor, share, 1, torch.Generator().manual_seed(seed))


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Server:
    """Keeps what it gets, and a digest of each."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def take(self, flat: Tensor, outer: list[TensorSpec]) -> None:
        """An envelope."""
        bucket = unseal(flat, outer)
        assert bucket is not None
        for spec, payload in bucket:
            old = self.tensors.get(spec.name)
            if old is None:
                old = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            self.tensors[spec.name] = decode(spec, payload, old, self.digests.pop(spec.name, None))
            self.digests[spec.name] = digest(old)


def send(base: Base, tensors: Bucket, servers: list[Server]) -> list[Piece]:
    (sent,) = changes([tensors], base, held_by_all([server.digests for server in servers]))
    flat = laid_flat([piece.payload for piece in sent])
    for server in servers:
        server.take(*seal(flat, [piece.spec for piece in sent]))
    return sent


# --- what goes out --------------------------------------------------------------------------------


def test_the_first_push_goes_whole_the_next_as_its_change_and_one_without_a_change_in_no_bytes():
    base, server = Base(), Server()
    old = tensor_of(3000, torch.bfloat16)
    new = old.view(torch.int16).clone()
    new[[7, 2999]] += 1
    new = new.view(torch.bfloat16)
    (first,) = send(base, [("w", old)], [server])
    assert first.spec == TensorSpec("w", (3000,), "bfloat16") and bits(first.payload) == bits(old)
    (second,) = send(base, [("w", new)], [server])
    # A table, 12 codes, a place and a narrow step of both.
    assert second.spec.delta == Delta(2 + 12 + 2 + 2, digest(old))
    assert second.digest == digest(new) == server.digests["w"]
    assert bits(server.tensors["w"]) == bits(new)
    (third,) = send(base, [("w", new)], [server])
    assert third.spec.delta == Delta(0, digest(new)) and third.payload.numel() == 0


def test_a_tensor_that_changed_all_over_goes_whole_and_needs_no_base():
    base, server = Base(), Server()
    old = tensor_of(500, torch.float32)
    new = (old.view(torch.int32) ^ 0x40404040).view(torch.float32)
    send(base, [("w", old)], [server])
    (sent,) = send(base, [("w", new)], [server])
    assert sent.spec.delta is None and bits(sent.payload) == bits(new)


def test_what_not_every_server_holds_alike_goes_whole():
    base, one, two = Base(), Server(), Server()
    a, b = tensor_of(600, torch.bfloat16), tensor_of(600, torch.bfloat16, 1)
    send(base, [("a", a), ("b", b)], [one, two])
    two.digests["b"] = digest(a)  # what it says it holds
    a, b = step_of(a), step_of(b)
    sent = send(base, [("a", a), ("b", b)], [one, two])
    assert [s.spec.delta is None for s in sent] == [False, True]
    new = Server()  # a server that was started again
    sent = send(base, [("a", step_of(a)), ("b", step_of(b))], [one, new])
    assert [s.spec.delta for s in sent] == [None, None]


def test_another_shape_or_dtype_under_a_name_goes_whole():
    base = Base()
    one = tensor_of(600, torch.bfloat16)
    for other in (one.view(20, 30), tensor_of(600, torch.float16), tensor_of(601, torch.bfloat16)):
        held = base.encode("w", one, None).digest
        sent = base.encode("w", other, held)
        assert sent.spec.delta is None and bits(sent.payload) == bits(other)
        (again,) = [base.encode("w", other, sent.digest)]
        assert again.spec.delta == Delta(0, digest(other))


def test_elements_of_eight_bytes_go_whole():
    base, server = Base(), Server()
    for value in (3, 3, 4):
        tensor = torch.full((50,), value)
        (sent,) = send(base, [("w", tensor)], [server])
        assert sent.spec.delta is None and torch.equal(server.tensors["w"], tensor)


def test_what_is_forgotten_goes_whole():
    base, server = Base(), Server()
    tensors = [(name, tensor_of(600, torch.bfloat16)) for name in "abc"]
    send(base, tensors, [server])
    base.forget(["a", "no such name"])
    assert [s.spec.delta is None for s in send(base, tensors, [server])] == [True, False, False]
    base.forget()
    assert base.num_bytes == 0 and not base.digests
    assert [s.spec.delta is None for s in send(base, tensors, [server])] == [True] * 3


def test_a_base_is_one_copy_of_what_was_sent_and_nobody_elses_memory():
    base, server = Base(), Server()
    tensors = [("a", tensor_of(600, torch.bfloat16)), ("b", tensor_of(40, torch.float32))]
    kept = dict(tensors)
    kept = {name: tensor.clone() for name, tensor in kept.items()}
    for _ in range(3):
        send(base, tensors, [server])
        assert base.num_bytes == 1200 + 160
        assert base.digests == {name: digest(tensor) for name, tensor in kept.items()}
        assert base.digest == push_digest(base.digests)
    for _, tensor in tensors:
        tensor.zero_()  # as an optimizer writes to weights in place
    sent = send(base, tensors, [server])
    assert all(not server.tensors[name].any() for name, _ in tensors)
    assert sent[0].spec.delta is None or sent[0].spec.delta.base == digest(kept["a"])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (40, 50)])
def test_any_shape_and_strides(shape):
    base, server = Base(), Server()
    tensor = tensor_of(torch.Size(shape).numel(), torch.bfloat16).view(shape)
    for _ in range(3):
        given_ = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
        send(base, [("w", given_)], [server])
        assert server.tensors["w"].shape == shape and bits(server.tensors["w"]) == bits(tensor)
        tensor = step_of(tensor.reshape(-1)).view(shape)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 700), st.sampled_from(DTYPES)), min_size=1, max_size=4),
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.integers(0, 2**20),
)
def test_servers_that_miss_pushes_have_every_bit_of_those_that_they_get(sizes, pushes, seed):
    """Each push goes to some of three servers; a push may reach nobody, or break off half-way."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [(f"w{i}", some_bits(n, dtype, generator)) for i, (n, dtype) in enumerate(sizes)]
    base, servers = Base(), [Server(), Server(), Server()]
    for k, reached in enumerate(pushes):
        share = (0.0, 0.05, 0.6)[k % 3]
        tensors = [
            (n, updated(t, share, 3, generator) if t.element_size() < 8 else t) for n, t in tensors
        ]
        serving = [s for s, is_reached in zip(servers, reached, strict=True) if is_reached]
        if k % 4 == 3:
            send(base, tensors[: (len(tensors) + 1) // 2], serving)  # and there it ends
            continue
        sent = send(base, tensors, serving)
        assert {s.spec.name: s.digest for s in sent} == base.digests
        for server in serving:
            assert server.digests == base.digests
            for name, tensor in tensors:
                assert bits(server.tensors[name]) == bits(tensor)


# --- what is refused ------------------------------------------------------------------------------


def encoded(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Piece]:
    base, old = Base(), tensor_of(3000, dtype)
    new = step_of(old)
    held = base.encode("w", old, None).digest
    sent = base.encode("w", new, held)
    assert sent.spec.delta is not None
    return old, new, sent


def test_a_change_is_applied_only_to_its_base():
    old, new, sent = encoded()
    other = step_of(old, seed=9)
    for held in (digest(other), None):
        before = bits(other)
        with pytest.raises(
            SyncError, match=f"w came as a change of {digest(old)}, but what is held"
        ):
            decode(sent.spec, sent.payload, other, held)
        assert bits(other) == before
    assert bits(decode(sent.spec, sent.payload, old, digest(old))) == bits(new)


def test_a_damaged_or_misplaced_payload_is_an_error_that_names_the_tensor_and_changes_nothing():
    old, _, sent = encoded()
    before, held = bits(old), digest(old)
    spec, payload = sent.spec, sent.payload
    spoilt = payload.clone()
    spoilt[2] = 200
    assert spec.delta is not None
    for wrong, given_, match in (
        (spec, spoilt, "w: chunk 0 of the payload has a code that is none"),
        (
            spec,
            payload[:-1],
            rf"w: found torch.uint8 \[{len(payload) - 1}\]; accepted: {len(payload)}",
        ),
        (spec, payload.view(1, -1), "w: found torch.uint8 .* bytes u8"),
        (spec, payload.float(), "w: found torch.float32"),
        (replace(spec, delta=None), payload, "w: found .*; accepted: 6000 bytes"),
        (replace(spec, delta=Delta(0, held)), payload, "w: found .*; accepted: 0 bytes"),
        (replace(spec, shape=(30, 100)), payload, r"w: found \(\(30, 100\), 'bfloat16'\)"),
        (replace(spec, dtype="float16"), payload, r"accepted: \(\(3000,\), 'bfloat16'\)"),
    ):
        with pytest.raises(SyncError, match=match):
            decode(wrong, given_, old, held)
        assert bits(old) == before


def test_a_view_that_is_not_contiguous_is_changed_in_place():
    """As a module that keeps a matrix transposed has it."""
    old, new, sent = encoded()
    whole = torch.zeros(50, 60, dtype=torch.bfloat16)
    place = whole.t()[:]
    spec = replace(sent.spec, shape=(60, 50))
    place.copy_(old.view(60, 50))
    assert decode(spec, sent.payload, place, digest(old)) is place
    assert bits(whole) == bits(new.view(60, 50).t())
    plain = replace(spec, delta=None)
    decode(plain, old.view(torch.uint8), place, None)
    assert bits(whole) == bits(old.view(60, 50).t())


# --- messages -------------------------------------------------------------------------------------


def test_what_travels_are_bytes():
    spec = TensorSpec("w", (3, 5), "float32")
    assert wire_spec(spec) == TensorSpec("w", (60,), "uint8")
    assert wire_spec(replace(spec, delta=Delta(7, "ab"))) == TensorSpec("w", (7,), "uint8")
    assert deltas_of([spec, replace(spec, delta=Delta(7, "ab"))]) == [None, [7, "ab"]]


@pytest.mark.parametrize("room", [None, 0, 30, 1000])
def test_an_envelope_is_two_tensors_of_bytes_wherever_there_is_room_for_it(room):
    specs = [
        TensorSpec("a", (2,), "bfloat16", Delta(3, "abcd")),
        TensorSpec("b", (), "float32"),
        TensorSpec("c", (5, 0), "float32", Delta(0, "ef")),
    ]
    flat = torch.arange(7, dtype=torch.uint8)
    buffer = None
    if room is not None:
        buffer = torch.full((7 + room,), 99, dtype=torch.uint8)
        flat = buffer[:7].copy_(flat)
    sealed, outer = seal(flat, specs, buffer)
    told = json.loads(bits(sealed[7:]))
    assert told == {
        "names": ["a", "b", "c"],
        "dtypes": ["bfloat16", "float32", "float32"],
        "shapes": [[2], [], [5, 0]],
        "deltas": [[3, "abcd"], None, [0, "ef"]],
    }
    assert outer == [
        TensorSpec(PAYLOADS, (7,), "uint8"),
        TensorSpec(HEADER, (len(sealed) - 7,), "uint8"),
    ]
    if room == 1000:
        assert sealed.data_ptr() == buffer.data_ptr()
    found = unseal(sealed, outer)
    assert [(spec, payload.tolist()) for spec, payload in found or ()] == [
        (specs[0], [0, 1, 2]),
        (specs[1], [3, 4, 5, 6]),
        (specs[2], []),
    ]


def test_a_bucket_of_other_tensors_is_no_envelope():
    for names in (["a", "b"], [PAYLOADS], [HEADER, PAYLOADS], []):
        assert not is_sealed([TensorSpec(name, (4,), "uint8") for name in names])


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"names": ["a"], "dtypes": ["uint8"], "shapes": [[4]]}',
        b'{"names": ["a"], "dtypes": ["uint8"], "shapes": [], "deltas": [null]}',
        b'{"names": ["a"], "dtypes": ["uint8"], "shapes": [[4]], "deltas": []}',
        b'{"names": ["a"], "dtypes": ["uint8"], "shapes": [4], "deltas": [null]}',
        b'{"names": ["a"], "dtypes": ["uint8"], "shapes": [["x"]], "deltas": [null]}',
        b'{"names": ["a"], "dtypes": ["nn"], "shapes": [[4]], "deltas": [null]}',
        b'{"names": ["a"], "dtypes": ["uint8"], "shapes": [[5]], "deltas": [null]}',
        b'{"names": ["a"], "dtypes": ["uint8"], "shapes": [[4]], "deltas": [[3, "ab"]]}',
    ],
)
def test_an_envelope_that_says_what_cannot_be_is_refused(header):
    flat = torch.tensor([1, 2, 3, 4, *header], dtype=torch.uint8)
    outer = [TensorSpec(PAYLOADS, (4,), "uint8"), TensorSpec(HEADER, (len(header),), "uint8")]
    with pytest.raises(SyncError):
        unseal(flat, outer)


@pytest.mark.parametrize(
    "deltas",
    [
        None,
        "",
        {},
        [],
        [None, None],
        [7],
        [[7]],
        [[7, "ab", 0]],
        [["7", "ab"]],
        [[7, None]],
        [[-1, "ab"]],
        [[61, "ab"]],
        [[True, "ab"]],
        [[7.0, "ab"]],
        [{"bytes": 7}],
    ],
)
def test_deltas_that_are_none_are_refused(deltas):
    spec = TensorSpec("w", (3, 5), "float32")
    with pytest.raises(SyncError, match=r"deltas: .*accepted: "):
        with_deltas([spec], deltas)
    assert with_deltas([spec], [[60, "ab"]]) == [replace(spec, delta=Delta(60, "ab"))]


def test_servers_hold_alike_what_all_of_them_say():
    one, two = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}
    assert held_by_all([one, two]) == {"a": "1"}
    assert held_by_all([one]) == one
    assert held_by_all([]) == {}
    assert held_by_all([one, {}]) == {}
