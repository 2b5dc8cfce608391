"""``python -m megarl.conformance CASES.json --backend torch|native --dtype float64|float32 --out
RESULTS.json``.

Exit codes: 0 every case passes; 1 some case fails or is unsupported; 2 the cases cannot be read,
the results not written, or the backend is not there.
"""

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from megarl.conformance.cases import (
    CommandError,
    Dtype,
    Result,
    read_cases,
    read_computed,
    verdict,
    write_results,
)

BACKENDS = ("torch", "native")
STATUSES = ("pass", "fail", "unsupported")
# How the choice reaches megarl.ops, which makes it when it is imported; other processes inherit it.
VARIABLE = "MEGARL_OPS"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        results = (
            judged(given.cases, given.judge, given.dtype)
            if given.judge is not None
            else computed(given.cases, given.backend, given.dtype)
        )
        return report(results, given.out)
    except CommandError as e:
        print(f"megarl.conformance: {e}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megarl.conformance",
        description="Compute test vectors of RL objectives and compare. See docs/conformance.md.",
    )
    parser.add_argument("cases", type=Path, metavar="CASES.json")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="torch",
        help="whose operators: the torch references (default) or the compiled ones",
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="of what enters: float32 is what training uses (default: float64)",
    )
    parser.add_argument(
        "--judge",
        type=Path,
        metavar="THEIRS.json",
        help="compare these results, of whatever implementation, instead of computing any",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="RESULTS.json")
    return parser


def use_backend(backend: str) -> None:
    """Raises CommandError where the operators asked for are not those in use."""
    os.environ[VARIABLE] = backend
    logging.getLogger("megarl.ops").setLevel(logging.ERROR)  # the references are what is asked for
    try:
        from megarl.ops import KERNELS, native_devices, native_library
    except ImportError as e:
        raise CommandError(f"--backend {backend}: {e}") from None
    if backend == "torch" and native_library() is not None:
        raise CommandError(
            "--backend torch: this process has loaded the compiled operators already"
        )
    missing = [op for op in KERNELS if "cpu" not in native_devices(op)]
    if backend == "native" and missing:
        raise CommandError(f"--backend native: no compiled {', '.join(missing)} in this process")


def computed(cases: Path, backend: str, dtype: Dtype) -> list[Result]:
    use_backend(backend)
    import torch

    from megarl.conformance.kinds import run_cases

    torch.set_num_threads(1)  # the numbers are few; threads would only wait for each other
    return list(run_cases(read_cases(cases), dtype))


def judged(cases: Path, theirs: Path, dtype: Dtype) -> list[Result]:
    """What another implementation computed, as its own command would report it."""
    found = read_computed(theirs)
    results = []
    for case in read_cases(cases):
        given = case.given
        if given.id in found:
            results.append(verdict(case, found[given.id], dtype))
        else:
            reason = f"{theirs} has no result of it"
            results.append(Result(given.id, given.kind, {}, "unsupported", reason))
    return results


def report(results: Sequence[Result], out: Path) -> int:
    """Write and print them; the exit code."""
    try:
        write_results(out, results)
    except OSError as e:
        raise CommandError(f"--out: {out} cannot be written: {e}") from None
    for result in results:
        if result.status != "pass":
            print(f"{result.status}: {result.id}: {result.reason}", file=sys.stderr)
    print(table(results))
    return 0 if all(r.status == "pass" for r in results) else 1


def table(results: Iterable[Result]) -> str:
    """Kind, cases, and how many of each status."""
    results = list(results)
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.kind, Counter())[result.status] += 1
    counts["all"] = Counter(r.status for r in results)
    width = max(map(len, counts))
    lines = [f"{'kind':<{width}}  cases   pass   fail  unsupported"]
    for kind, of_kind in counts.items():
        passed, failed, other = (of_kind[status] for status in STATUSES)
        total = of_kind.total()
        lines.append(f"{kind:<{width}}  {total:5}  {passed:5}  {failed:5}  {other:11}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
