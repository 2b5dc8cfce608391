"""digest_partial: the share of a read's bandwidth, and against its reference and sha256.

A read of the same number of bytes, as torch sums 64-bit integers, is timed in the same rounds. The
second case is a column shard, whose runs are 8 KiB.
"""

import hashlib
from collections.abc import Iterator

import torch

from megarl.ops import digest_partial, digest_partial_ref
from opsbench.measure import Row, best_times, read_call, threads


def rows(quick: bool) -> Iterator[Row]:
    num_rows, num_columns = (512, 1024) if quick else (16_384, 8192)
    for dtype in (torch.bfloat16, torch.float32):
        whole = torch.randn(num_rows * 2 // dtype.itemsize, num_columns).to(dtype)
        for case, shape, offset in (
            ("whole", whole.shape, [0, 0]),
            ("columns", (whole.shape[0], 2 * num_columns), [0, num_columns]),
        ):
            for num_threads in (1, 2):
                with threads(num_threads):
                    yield _row(whole, case, list(shape), offset, num_threads, quick)


def _row(
    tensor: torch.Tensor,
    case: str,
    full_shape: list[int],
    offset: list[int],
    num_threads: int,
    quick: bool,
) -> Row:
    calls = {
        "native": lambda: digest_partial(tensor, full_shape=full_shape, offset=offset),
        "read": read_call(tensor.nbytes),
    }
    best = best_times(calls, 3 if quick else 15)
    few = {
        "reference": lambda: digest_partial_ref(tensor, full_shape, offset),
        "sha256": lambda: hashlib.sha256(tensor.view(torch.uint8).numpy()).digest(),
    }
    slow = best_times(few, 1, budget_s=1.0)
    return Row(
        "digest_partial",
        f"{case} {str(tensor.dtype).removeprefix('torch.')}",
        tensor.numel(),
        num_threads,
        vs_reference=slow["reference"] / best["native"],
        seconds=best["native"],
        note=(
            f"{tensor.nbytes / best['native'] / 1e9:.1f} GB/s, "
            f"{best['read'] / best['native']:.2f} of a read, "
            f"{slow['sha256'] / best['native']:.0f} x sha256"
        ),
    )
