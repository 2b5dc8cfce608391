"""Checks and times every kernel on this machine's GPU, and writes one JSON file.

    python tools/verify_gpu.py --json FILE
    python tools/verify_gpu.py --cpu --json FILE     the same on a CPU: that this program works

Needs this repository, torch 2.10 or newer with numpy, nvcc and g++; no network, and nothing
installed. It compiles csrc/ for the GPU's own architecture into a temporary folder, then, for
every op:

1. its self-check, which is also what a run does when it starts (megarl/ops/_selfcheck.py);
2. a call of realistic size (kernel_cases.py), compared with the reference computed on the CPU;
3. the same call again: the same bits;
4. times, the median of several, beside torch's on the same device, and the bandwidth reached.

Ops run in a process of their own, since a kernel that fails takes the device's context along; one
that does not answer is ended and the others go on. Exit code 0: every op passes; 1: some op fails;
2: there is no GPU, or the kernels do not compile.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from kernel_checks import Report, run_ops
from native_build import DEFAULT, BuildError, Compilers, build_library

BUDGET_S = 450.0
OP_LIMIT_S = 120.0


def main() -> int:
    given = _parser().parse_args()
    started = time.monotonic()
    if not given.cpu and not torch.cuda.is_available():
        print("verify_gpu: torch sees no CUDA device here; --cpu tries the program itself")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            library, compile_s = _compile(Path(folder), given)
        except BuildError as e:
            print(f"verify_gpu: the kernels do not compile: {e}")
            return 2
        found = run_ops(
            library,
            "cpu" if given.cpu else "cuda",
            op_limit_s=given.op_limit,
            until=started + given.budget,
            only=given.op,
        )
        reports = []
        for report in found:
            print(_line(report), flush=True)
            reports.append(report)
    ok = bool(reports) and all(report["ok"] for report in reports)
    result = {"ok": ok, **_machine(given.cpu), "compile_s": round(compile_s, 1)}
    result |= {"total_s": round(time.monotonic() - started, 1), "ops": reports}
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    passed = sum(report["ok"] for report in reports)
    print(f"{passed} of {len(reports)} ops pass on {result['device']}, {result['total_s']} s")
    return 0 if ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--cpu", action="store_true", help="without CUDA, at small sizes")
    parser.add_argument("--op", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--nvcc", default=DEFAULT.nvcc, help="the CUDA compiler")
    parser.add_argument("--library", type=Path, help="a library to check instead of compiling one")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="S", help="seconds for all of it"
    )
    parser.add_argument(
        "--op-limit", type=float, default=OP_LIMIT_S, metavar="S", help="seconds for one op"
    )
    return parser


def _compile(folder: Path, given: argparse.Namespace) -> tuple[Path, float]:
    """The library, and the seconds it took."""
    if given.library is not None:
        return given.library, 0.0
    start = time.monotonic()
    arch = None
    if not given.cpu:
        arch = ".".join(map(str, torch.cuda.get_device_capability()))
    print(f"compiling csrc/ for {arch or 'the CPU'}, {DEFAULT.jobs} files at a time", flush=True)
    library = build_library(folder / "_C.so", cuda_arch=arch, compilers=Compilers(nvcc=given.nvcc))
    return library, time.monotonic() - start


def _machine(cpu: bool) -> dict[str, Any]:
    about: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if cpu:
        return {"device": f"cpu ({os.cpu_count()} cores)"} | about
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return {
        "device": torch.cuda.get_device_name(),
        "capability": capability,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        **about,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def _line(report: Report) -> str:
    if not report["ok"]:
        return f"FAIL  {report['op']}: {report['error']}"
    if report.get("native_ms") is None:
        return f"ok    {report['op']}: {report.get('note')}"
    return (
        f"ok    {report['op']}: {report['native_ms']:.4g} ms, torch {report['torch_ms']:.4g} ms "
        f"({report['speedup']:.3g} x), {report['gb_per_s']:.4g} GB/s; {report['size']}"
    )


if __name__ == "__main__":
    sys.exit(main())
