"""Buckets for tests of receivers: cut without a thought of who packs them in a push."""

from collections.abc import Iterable, Iterator

import torch

from megarl.protocols import Bucket


def bucketize(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """In order, of one width each; a tensor that is larger than a bucket travels alone."""
    bucket: Bucket = []
    for name, tensor in tensors:
        size = tensor.nbytes + sum(t.nbytes for _, t in bucket)
        if bucket and (size > max_bytes or bucket[0][1].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    if bucket:
        yield bucket
