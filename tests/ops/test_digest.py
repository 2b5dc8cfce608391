"""digest: every implementation there is, against the definition in Python integers."""

import hashlib
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.ops import _native, digest, digest_partial, digest_partial_ref, finish, merge
from tests.ops.plain_digest import DTYPES, plain, plain_slice, raw, some

NATIVE = "cpu" in _native.native_devices("digest_partial")
needs_native = pytest.mark.skipif(not NATIVE, reason="the compiled operators are not built")


def native(tensor: Tensor, full_shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    return torch.ops.megarl.digest_partial(tensor, list(full_shape), list(offset))


both = pytest.mark.parametrize("op", [pytest.param(native, marks=needs_native), digest_partial_ref])


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (2, 3), (700, 9)])
def test_is_the_sum_over_bytes_that_it_says(op, dtype, shape):
    tensor = some(shape, dtype)
    offset = [0] * len(shape)
    assert int(op(tensor, shape, offset)) == plain_slice(tensor, shape, offset)


def test_a_digest_covers_dtype_shape_and_partial():
    tensor = some((2, 3), torch.bfloat16)
    text = f"bfloat16|[2, 3]|{plain_slice(tensor, (2, 3), (0, 0)):016x}"
    assert digest(tensor) == hashlib.sha256(text.encode()).hexdigest()[:16]


@both
def test_values_that_must_never_change(op):
    """Digests are stored: these were computed by `plain`, from the definition."""
    tensor = torch.arange(5000, dtype=torch.int16)
    partial = int(op(tensor, [5000], [0]))
    assert partial == 1209316077193888672
    assert finish(partial, torch.int16, [5000]) == "6d47a64b4cdfbe0d"


@needs_native
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3)), max_size=5),
    st.sampled_from(DTYPES),
    st.integers(0, 2**20),
)
def test_any_slice_of_any_dtype_in_kernel_and_reference(dims, dtype, seed):
    part = some([size for size, _, _ in dims], dtype, seed)
    full = [before + size + after for size, before, after in dims]
    offset = [before for _, before, _ in dims]
    expected = int(digest_partial_ref(part, full, offset))
    assert int(native(part, full, offset)) == expected
    if part.nbytes < 5000:
        assert plain_slice(part, full, offset) == expected


# --- slices ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slices_along_any_dimension_merge_into_the_whole(op, dtype, dim):
    tensor = some((17, 5, 61), dtype)
    whole = int(op(tensor, tensor.shape, [0, 0, 0]))
    cuts = [0, 1, tensor.shape[dim] // 2, tensor.shape[dim]]
    partials = []
    for start, end in pairwise(cuts):
        offset = [0, 0, 0]
        offset[dim] = start
        # A view of the whole, not contiguous for dim > 0.
        partials.append(op(tensor.narrow(dim, start, end - start), tensor.shape, offset))
    assert merge(partials) == merge(reversed(partials)) == whole


@both
def test_expert_shards_split_along_two_dimensions_merge(op):
    experts = some((8, 24, 40), torch.bfloat16)  # EP 4 x TP 3
    partials = [
        op(experts[e : e + 2, t : t + 8], experts.shape, [e, t, 0])
        for e in (0, 2, 4, 6)
        for t in (0, 8, 16)
    ]
    assert finish(merge(partials), experts.dtype, experts.shape) == digest(experts)


@both
def test_positions_beyond_32_bits(op):
    shard = some((3, 5), torch.float32)
    full, offset = (2**40, 16), (2**39 + 1, 9)
    assert int(op(shard, full, offset)) == plain_slice(shard, full, offset)


@both
def test_strided_input_counts_as_what_it_holds(op):
    tensor = some((30, 40), torch.float32)
    for view in (tensor.t(), tensor[::2, 1::3], tensor.expand(3, 30, 40)):
        offset = [0] * view.dim()
        assert int(op(view, view.shape, offset)) == int(op(view.contiguous(), view.shape, offset))


@both
def test_memory_that_is_not_aligned(op):
    buffer = some((4109,), torch.uint8)
    for start in range(4):
        part = buffer[start:]
        positions = range(start + 1, start + 1 + part.numel())
        assert int(op(part, [5000], [start + 1])) == plain(raw(part), positions)


def test_a_slice_with_more_strided_dimensions_than_usual():
    part = some((2,) * 8, torch.bfloat16)
    full, offset = (3,) * 8, (1,) * 8
    expected = plain_slice(part, full, offset)
    assert int(digest_partial(part, full_shape=full, offset=offset)) == expected


# --- the op ---------------------------------------------------------------------------------------


@needs_native
def test_thread_count_changes_nothing():
    tensor = some((3, 700_001), torch.bfloat16)
    before = torch.get_num_threads()
    try:
        found = set()
        for num_threads in (1, 2, 3, 8):
            torch.set_num_threads(num_threads)
            found.add(int(native(tensor, (3, 700_003), (0, 1))))
    finally:
        torch.set_num_threads(before)
    assert found == {int(digest_partial_ref(tensor, (3, 700_003), (0, 1)))}


@needs_native
def test_opcheck():
    op = torch.ops.megarl.digest_partial
    torch.library.opcheck(op, (torch.randn(3, 4), [3, 9], [0, 5]))
    torch.library.opcheck(op, (torch.zeros(0, dtype=torch.bfloat16), [4], [2]))


@needs_native
def test_the_public_function_runs_the_kernel(monkeypatch):
    def refuse(*_: object) -> Tensor:
        raise AssertionError("digest ran the reference although the kernel is loaded")

    monkeypatch.setattr(sys.modules["megarl.ops.digest"], "digest_partial_ref", refuse)
    assert len(digest(torch.ones(3, requires_grad=True))) == 16


@both
@pytest.mark.parametrize(
    ("tensor", "full_shape", "offset", "message"),
    [
        (torch.zeros(2, dtype=torch.complex128), [2], [0], "1, 2, 4 or 8 bytes, got 16"),
        (torch.zeros(2, 3), [6], [0], "2 dimension.s., got 1 and 1"),
        (torch.zeros(2, 3), [2, 3], [0], "2 dimension.s., got 2 and 1"),
        (torch.zeros(()), [1], [0], "0 dimension.s., got 1 and 1"),
        (torch.zeros(2, 3), [2, 3], [0, 1], "dimension 1 of the slice is 3 from 1 on, .* 3"),
        (torch.zeros(2, 3), [4, 3], [-1, 0], "dimension 0 of the slice is 2 from -1 on"),
        (torch.zeros(2, 3), [1, 3], [0, 0], "dimension 0 of the slice is 2 from 0 on, .* 1"),
        (torch.zeros(0), [2], [3], "dimension 0 of the slice is 0 from 3 on"),
        (torch.zeros(2), [9], [2**63 - 1], "is 2 from 9223372036854775807 on"),
    ],
)
def test_bad_arguments_are_refused_with_what_was_found(op, tensor, full_shape, offset, message):
    with pytest.raises(RuntimeError, match=f"digest_partial: .*{message}"):
        op(tensor, full_shape, offset)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # On a GPU machine a silent fall-back to the reference would pass the test below.
    assert "cuda" in _native.native_devices("digest_partial"), "the CUDA kernel is not built"
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_equals_the_cpu(cuda, dtype):
    for shape in ((), (0, 3), (7,), (513, 1025)):
        tensor = some(shape, dtype)
        assert digest(tensor.to(cuda)) == digest(tensor)
    part = some((5, 33, 7), dtype)
    full, offset = (6, 35, 9), (1, 2, 1)
    on_gpu = digest_partial(part.to(cuda), full_shape=full, offset=offset)
    assert int(on_gpu) == int(digest_partial(part, full_shape=full, offset=offset))
