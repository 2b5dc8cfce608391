"""Times the compiled ops against what else there is, side by side in one run.

    .venv/bin/python tools/bench_ops.py [--op NAME ...] [--quick] [--json FILE]

Alternatives: ``vs_reference`` our own torch reference; ``vs_padded`` an eager implementation on
padded [B, T] rectangles, as verl and TRL have it; ``vs_loop`` a loop over samples, as slime has it.
All are forward and backward. Numbers are ratios: see tools/opsbench/measure.py.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from opsbench import (
    delta,
    digest,
    fp8_block,
    gae,
    logprob_entropy,
    pack,
    policy_loss,
    routing_codec,
)
from opsbench.measure import Row

BENCHES: dict[str, Callable[[bool], Iterable[Row]]] = {
    "delta": delta.rows,
    "digest": digest.rows,
    "fp8_block": fp8_block.rows,
    "gae": gae.rows,
    "logprob_entropy": logprob_entropy.rows,
    "pack": pack.rows,
    "policy_loss": policy_loss.rows,
    "routing_codec": routing_codec.rows,
}
"""Op -> ``rows(quick)``; ``quick``: small sizes, to see that it runs."""

COLUMNS = ("op", "case", "tokens", "threads", "vs_padded", "vs_loop", "vs_reference")
COLUMNS += ("copy_bandwidth_fraction", "seconds", "note")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", nargs="+", choices=sorted(BENCHES), default=sorted(BENCHES))
    parser.add_argument("--quick", action="store_true", help="small sizes: only that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    rows: list[Row] = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads at most")
    print("  ".join(f"{name:>14}" for name in COLUMNS))
    for op in given.op:
        for row in BENCHES[op](given.quick):
            rows.append(row)
            print("  ".join(f"{cell(v):>14}" for v in asdict(row).values()), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
