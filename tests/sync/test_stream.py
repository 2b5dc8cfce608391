"""Weight streams: cutting, laying flat and accounting, on tensors alone."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import SyncError
from megarl.ops import digest
from megarl.protocols import Bucket
from megarl.sync.stream import bucketize, flatten, push_digest, specs_of, unflatten
from megarl.types import TensorSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def some_tensors(sizes: list[int], dtypes: list[torch.dtype]) -> Bucket:
    return [
        (f"w{i}", torch.arange(size).to(torch.float32).to(dtype))
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=12),
    st.sampled_from([1, 7, 16, 64, 300, 10**9]),
)
def test_every_name_once_nothing_too_large_and_back_again(
    shapes: list[tuple[int, torch.dtype]], max_bytes: int
) -> None:
    tensors = some_tensors([n for n, _ in shapes], [d for _, d in shapes])
    buckets = list(bucketize(iter(tensors), max_bytes))
    assert sorted(name for bucket in buckets for name, _ in bucket) == sorted(n for n, _ in tensors)
    returned = {}
    for bucket in buckets:
        assert bucket
        assert len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= max_bytes
        flat = flatten(bucket)
        assert flat.dtype == torch.uint8 and flat.numel() == sum(t.nbytes for _, t in bucket)
        returned.update(unflatten(flat, specs_of(bucket)))
    for name, tensor in tensors:
        assert returned[name].dtype == tensor.dtype
        assert digest(returned[name]) == digest(tensor)


def test_a_bucket_is_filled_in_order_and_an_oversize_tensor_travels_alone() -> None:
    tensors = some_tensors([2, 2, 1, 50, 1, 1], [torch.float32] * 6)
    names = [[name for name, _ in bucket] for bucket in bucketize(tensors, 16)]
    assert names == [["w0", "w1"], ["w2"], ["w3"], ["w4", "w5"]]


def test_wider_types_come_first_so_that_every_offset_fits() -> None:
    """3 bytes of float8, then a float32: not at byte 3."""
    tensors = some_tensors([3, 1, 5], [torch.float8_e4m3fn, torch.float32, torch.bfloat16])
    (bucket,) = bucketize(tensors, 10**6)
    assert [name for name, _ in bucket] == ["w1", "w2", "w0"]
    with pytest.raises(SyncError, match="w1: begins at byte 3"):
        flatten(tensors)


def test_a_name_cannot_come_twice() -> None:
    tensor = torch.zeros(1)
    with pytest.raises(SyncError, match="a was produced twice"):
        list(bucketize([("a", tensor), ("b", tensor), ("a", tensor)], 4))


def test_bytes_that_do_not_fit_the_description_are_refused() -> None:
    spec = TensorSpec("a", (2, 3), "float32")
    with pytest.raises(SyncError, match="23 bytes, not 24"):
        unflatten(torch.zeros(23, dtype=torch.uint8), [spec])
    with pytest.raises(SyncError, match="dtype: found 'nn'"):
        unflatten(torch.zeros(24, dtype=torch.uint8), [TensorSpec("a", (6,), "nn")])


def test_a_pushs_digest_is_sha256_over_sorted_names_and_digests() -> None:
    push = hashlib.sha256(b"a 11\nb 22\n").hexdigest()
    assert push_digest({"b": "22", "a": "11"}) == push
