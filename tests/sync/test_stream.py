"""Weight streams: cutting, laying flat and accounting, on tensors alone."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import SyncError
from megarl.ops import digest
from megarl.protocols import Bucket
from megarl.sync.stream import flatten, push_digest, specs_of, unflatten
from megarl.types import TensorSpec

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def some_tensors(sizes: list[int], dtypes: list[torch.dtype]) -> Bucket:
    return [
        (f"w{i}", torch.arange(size).to(torch.float32).to(dtype))
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=12))
def test_what_is_laid_flat_comes_back(shapes: list[tuple[int, torch.dtype]]) -> None:
    tensors = some_tensors([n for n, _ in shapes], [d for _, d in shapes])
    tensors.sort(key=lambda item: -item[1].element_size())
    if not tensors:
        return
    flat = flatten(tensors)
    assert flat.dtype == torch.uint8
    assert flat.numpy().tobytes() == b"".join(
        tensor.contiguous().view(torch.uint8).numpy().tobytes() for _, tensor in tensors
    )
    returned = dict(unflatten(flat, specs_of(tensors)))
    for name, tensor in tensors:
        assert returned[name].dtype == tensor.dtype
        assert digest(returned[name]) == digest(tensor)


def test_a_tensor_that_would_begin_between_its_items_is_refused() -> None:
    """3 bytes of float8, then a float32: not at byte 3."""
    tensors = some_tensors([3, 1], [torch.float8_e4m3fn, torch.float32])
    with pytest.raises(SyncError, match="w1: begins at byte 3"):
        flatten(tensors)


def test_bytes_that_do_not_fit_the_description_are_refused() -> None:
    spec = TensorSpec("a", (2, 3), "float32")
    with pytest.raises(SyncError, match="23 bytes, not 24"):
        unflatten(torch.zeros(23, dtype=torch.uint8), [spec])
    with pytest.raises(SyncError, match="dtype: found 'nn'"):
        unflatten(torch.zeros(24, dtype=torch.uint8), [TensorSpec("a", (6,), "nn")])


def test_a_pushs_digest_is_sha256_over_sorted_names_and_digests() -> None:
    push = hashlib.sha256(b"a 11\nb 22\n").hexdigest()
    assert push_digest({"b": "22", "a": "11"}) == push
