"""delta_encode_ and delta_apply_: GB/s of the tensor, beside a copy of it, at several shares of
changed elements, all by one step of their bit pattern.
"""

from collections.abc import Iterator
from itertools import cycle

import torch

from megarl.ops import delta_apply_, delta_apply_ref_, delta_encode_, delta_encode_ref_
from opsbench.measure import Call, Row, best_times, copy_call, threads

SHARES = (0.003, 0.03, 0.3, 1.0)


def rows(quick: bool) -> Iterator[Row]:
    for name, bits in (("bf16", torch.int16), ("fp8", torch.uint8)):
        generator = torch.Generator().manual_seed(0)
        numel = (1 << 20 if quick else 1 << 27) // bits.itemsize
        old = torch.randint(0, 100, (numel,), dtype=bits, generator=generator)
        draws = torch.rand(numel, generator=generator)
        for share in SHARES:
            new = (old + (draws < share)).to(bits)
            for num_threads in (1, 2):
                with threads(num_threads):
                    yield from _pair(old, new, f"{name} {share:.1%}", num_threads, quick)


def _pair(
    old: torch.Tensor, new: torch.Tensor, case: str, num_threads: int, quick: bool
) -> Iterator[Row]:
    """To the new tensor and back again, call by call, so that there is always as much to do."""
    base, copy = old.clone(), old.clone()
    forth = delta_encode_(old.clone(), new)
    targets, payloads = cycle((new, old)), cycle((forth, delta_encode_(new.clone(), old)))
    calls: dict[str, Call] = {
        "encode": lambda: delta_encode_(base, next(targets)),
        "apply": lambda: delta_apply_(copy, next(payloads)),
        "copy": copy_call(2 * old.nbytes),
    }
    best = best_times(calls, 4 if quick else 12)
    slow = best_times(
        {
            "encode": lambda: delta_encode_ref_(base, next(targets)),
            "apply": lambda: delta_apply_ref_(copy, next(payloads)),
        },
        1,
    )
    for name in ("encode", "apply"):
        yield Row(
            f"delta_{name}_",
            case,
            old.numel(),
            num_threads,
            vs_reference=slow[name] / best[name],
            copy_bandwidth_fraction=best["copy"] / best[name],
            seconds=best[name],
            note=(
                f"{old.nbytes / best[name] / 1e9:.1f} GB/s, "
                f"{forth.numel() / old.nbytes:.2%} of its bytes"
            ),
        )
