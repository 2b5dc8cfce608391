"""digest_copy_: what is copied, and what the digest is of."""

import platform
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops import _native, digest_copy_, digest_copy_ref_, digest_partial_ref
from tests.ops.plain_digest import DTYPES, plain_slice, raw, some

NATIVE = "cpu" in _native.native_devices("digest_copy_")
needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled operators are not built")
BLOCK = 4096


def native(place: Tensor, source: Tensor, read_back: bool) -> Tensor:
    return torch.ops.megarl.digest_copy_(place, source, read_back)


both = pytest.mark.parametrize("op", [pytest.param(native, marks=needs_native), digest_copy_ref_])
either_end = pytest.mark.parametrize("read_back", [False, True])


@both
@either_end
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (70, 9)])
def test_is_a_copy_and_the_sum_over_its_bytes(op, read_back, dtype, shape):
    source, place = some(shape, dtype), torch.zeros(shape, dtype=dtype)
    expected = plain_slice(source, shape, [0] * len(shape))
    assert int(op(place, source, read_back)) == expected
    assert raw(place) == raw(source)


@needs_native
@either_end
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4 * 2**18), st.integers(0, 70), st.integers(0, 70))
def test_bytes_lie_anywhere_and_their_neighbours_stay(read_back, size, ahead, before):
    source = some((before + size,), torch.uint8)[before:]
    room = torch.full((ahead + size + 70,), 7, dtype=torch.uint8)
    found = native(room[ahead : ahead + size], source, read_back)
    assert int(found) == int(digest_partial_ref(source, [size], [0]))
    assert torch.equal(room[ahead : ahead + size], source)
    assert (room[:ahead] == 7).all() and (room[ahead + size :] == 7).all()


@needs_native
@either_end
def test_thread_count_changes_nothing(read_back):
    source = some((3, 700_001), torch.bfloat16)
    before = torch.get_num_threads()
    try:
        found = set()
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            place = torch.zeros_like(source)
            found.add(int(native(place, source, read_back)))
            assert raw(place) == raw(source)
    finally:
        torch.set_num_threads(before)
    assert found == {int(digest_partial_ref(source, source.shape, [0, 0]))}


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="there the copy's order is not known")
def test_what_is_read_back_is_the_place_as_it_is_after_writing():
    """A place that overlaps its source from behind: each 16 bytes written change the next that are
    read, so that the place ends up with what the source never was.
    """
    size = 3 * BLOCK
    for read_back in (False, True):
        memory = some((size + 16,), torch.uint8)
        source, place = memory[:size], memory[16:]
        assert place.data_ptr() % 16 == 0
        first = source[:16].clone()
        found = int(native(place, source, read_back))
        assert torch.equal(place, first.repeat(size // 16))
        assert (found == int(digest_partial_ref(place, [size], [0]))) == read_back


@either_end
@pytest.mark.parametrize("contiguous", ["place", "source", "neither"])
def test_memory_that_is_no_run_is_copied_as_well(read_back, contiguous):
    source, place = some((40, 30), torch.float16), torch.zeros(40, 30, dtype=torch.float16)
    if contiguous != "source":
        source = source.t().contiguous().t()
    if contiguous != "place":
        place = torch.zeros(30, 40, dtype=torch.float16).t()
    found = int(digest_copy_(place, source, read_back=read_back))
    assert found == plain_slice(source, (40, 30), (0, 0)) and raw(place) == raw(source)


def test_a_conversion_is_digested_as_it_was_or_as_it_became():
    source = torch.randn(50, 3)
    place = torch.zeros(50, 3, dtype=torch.bfloat16)
    found = [int(digest_copy_(place, source, read_back=read_back)) for read_back in (False, True)]
    assert found == [plain_slice(t, (50, 3), (0, 0)) for t in (source, source.bfloat16())]


@needs_native
def test_opcheck():
    op = torch.ops.megarl.digest_copy_
    torch.library.opcheck(op, (torch.zeros(3, 4), torch.randn(3, 4), True))
    torch.library.opcheck(op, (torch.zeros(0), torch.zeros(0), False))


@needs_native
def test_the_public_function_runs_the_kernel(monkeypatch):
    def refuse(*_: object) -> Tensor:
        raise AssertionError("the reference ran although the kernel is loaded")

    monkeypatch.setattr(sys.modules["megarl.ops.digest"], "digest_copy_ref_", refuse)
    place = torch.zeros(3)
    digest_copy_(place, torch.ones(3, requires_grad=True))
    assert place.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("place", "source", "message"),
    [
        (torch.zeros(2, dtype=torch.complex128),) * 2 + ("1, 2, 4 or 8 bytes, got 16",),
        (torch.zeros(3, 2), torch.zeros(2, 3), r"shape \[2, 3\], got \[3, 2\]"),
        (torch.zeros(3), torch.zeros(4), r"shape \[4\], got \[3\]"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_found(place, source, message):
    with pytest.raises(RuntimeError, match=f"digest_copy_: .*{message}"):
        digest_copy_(place, source)


@needs_native
@pytest.mark.parametrize(
    ("place", "source", "message"),
    [
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.bfloat16),
            "have 2 bytes an element like the source, got 4",
        ),
        (torch.zeros(3), torch.zeros(4), "of 4 elements, got one of 3"),
        (torch.zeros(4), torch.zeros(2, 2), "of 4 elements, got one of 4"),
        (torch.zeros(2, 3).t(), torch.zeros(3, 2), "must be contiguous"),
        (torch.zeros(3, 2), torch.zeros(2, 3).t(), "must be contiguous"),
        (torch.zeros(2, dtype=torch.complex128),) * 2 + ("1, 2, 4 or 8 bytes, got 16",),
    ],
)
def test_the_kernel_refuses_what_it_cannot_copy(place, source, message):
    with pytest.raises(RuntimeError, match=f"digest_copy_: .*{message}"):
        native(place, source, True)
