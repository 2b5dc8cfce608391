"""fp8_block_quant and fp8_block_dequant: against their references, which are the plain torch way,
and the share of a copy's bandwidth. The copy's target is in place; the ops allocate their results.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megarl.ops import (
    fp8_block_dequant,
    fp8_block_dequant_ref,
    fp8_block_quant,
    fp8_block_quant_ref,
)
from opsbench.measure import Call, Row, best_times, copy_call, threads


def rows(quick: bool) -> Iterator[Row]:
    n, k = (256, 512) if quick else (4096, 14_336)
    for dtype in (torch.bfloat16, torch.float32):
        x = (torch.randn(n, k) * 0.02).to(dtype)
        for num_threads in (1, 2):
            for block in ((128, 128), (1, 128)):
                with threads(num_threads):
                    yield _quant(x, block, num_threads, quick)
            with threads(num_threads):
                yield _dequant(x, (128, 128), num_threads, quick)


def _quant(x: torch.Tensor, block: tuple[int, int], num_threads: int, quick: bool) -> Row:
    native = lambda: fp8_block_quant(x, block=block)  # noqa: E731
    plain = lambda: fp8_block_quant_ref(x, *block, 1e-10, False)  # noqa: E731
    return _row("fp8_block_quant", x, block, num_threads, native, plain, quick)


def _dequant(x: torch.Tensor, block: tuple[int, int], num_threads: int, quick: bool) -> Row:
    codes, scales = fp8_block_quant(x, block=block)
    native = lambda: fp8_block_dequant(codes, scales, block=block, dtype=x.dtype)  # noqa: E731
    plain = lambda: fp8_block_dequant_ref(codes, scales, *block, x.dtype)  # noqa: E731
    return _row("fp8_block_dequant", x, block, num_threads, native, plain, quick)


def _row(
    op: str,
    x: torch.Tensor,
    block: tuple[int, int],
    num_threads: int,
    native: Call,
    plain: Call,
    quick: bool,
) -> Row:
    num_bytes = x.nbytes + x.numel()
    calls: dict[str, Any] = {"native": native, "plain": plain, "copy": copy_call(num_bytes)}
    best = best_times(calls, 2 if quick else 5, budget_s=4.0)
    return Row(
        op,
        f"{block[0]}x{block[1]} {str(x.dtype).removeprefix('torch.')}",
        x.numel(),
        num_threads,
        vs_reference=best["plain"] / best["native"],
        copy_bandwidth_fraction=best["copy"] / best["native"],
        seconds=best["native"],
        note=f"{num_bytes / best['native'] / 1e9:.1f} GB/s",
    )
