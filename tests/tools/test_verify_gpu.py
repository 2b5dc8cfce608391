"""tools/verify_gpu.py, of which only CUDA itself cannot be tried without a GPU."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megarl.ops import KERNELS, native_library
from tools import kernel_cases, kernel_checks

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "verify_gpu.py"
LIBRARY = native_library()
CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(LIBRARY is None, reason="the compiled operators are not built")


def verify(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def check_result(path: Path, run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(path.read_text())
    assert result["ok"]
    reports = {report["op"]: report for report in result["ops"]}
    assert set(reports) >= set(KERNELS)
    for op in KERNELS:
        assert reports[op]["ok"] and reports[op]["deterministic"], reports[op]
        assert min(reports[op][key] for key in ("native_ms", "torch_ms", "gb_per_s")) > 0


@needs_native
def test_every_kernel_passes_and_is_timed_on_a_cpu(tmp_path):
    run = verify("--cpu", "--library", LIBRARY, "--json", tmp_path / "result.json")
    check_result(tmp_path / "result.json", run)


@pytest.mark.slow
def test_it_compiles_the_sources_itself(tmp_path):
    run = verify("--cpu", "--json", tmp_path / "result.json")
    check_result(tmp_path / "result.json", run)
    assert json.loads((tmp_path / "result.json").read_text())["compile_s"] > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so():
    run = verify()
    assert run.returncode == 2
    assert "torch sees no CUDA device" in run.stdout


def test_a_failed_build_is_told_apart_from_a_failed_op(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = verify("--cpu", "--json", tmp_path / "result.json")
    assert run.returncode == 2
    assert "do not compile" in run.stdout and "no-such-compiler" in run.stdout


def test_every_kernel_has_a_case():
    assert set(kernel_cases.CASES) >= set(KERNELS)


PROBE = """
import sys
import numpy, torch
before = set(sys.modules)
import megarl.ops
sys.path.insert(0, "tools")
import kernel_cases, kernel_checks, native_build, verify_gpu
ours = {"megarl", "kernel_cases", "kernel_checks", "kernel_policy", "native_build"}
ours |= {"native_flags", "verify_gpu"}
roots = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(roots - ours - set(sys.stdlib_module_names) - {"torch", "numpy"}))
print(sorted({n.split(".")[1] for n in sys.modules if n.startswith("megarl.")}))
"""


def test_it_needs_torch_and_nothing_else():
    run = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    foreign, parts = run.stdout.splitlines()
    assert foreign == "[]"
    assert set(json.loads(parts.replace("'", '"'))) <= {"_C", "_host", "errors", "ops", "types"}


# --- what fails -----------------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
for op in sys.argv[2:]:
    if op == "dies":
        print("a trap", file=sys.stderr)
        os._exit(134)
    if op == "hangs":
        time.sleep(600)
    ok = op != "wrong"
    print(json.dumps({"op": op, "ok": ok, "error": None if ok else "off"}), flush=True)
"""


def reports_of(tmp_path: Path, *ops: str, limit_s: float = 60, budget_s: float = 60):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    found = kernel_checks.run_ops(
        tmp_path / "none.so",
        "cpu",
        op_limit_s=limit_s,
        until=time.monotonic() + budget_s,
        only=ops,
        worker=(sys.executable, str(script)),
    )
    return [(r["op"], r["ok"], r["error"]) for r in found]


def test_an_op_that_fails_or_dies_does_not_hide_the_others(tmp_path):
    found = reports_of(tmp_path, "one", "wrong", "two", "dies", "three", "dies")
    died = "ended with code 134: a trap\n"
    assert found == [
        ("one", True, None),
        ("wrong", False, "off"),
        ("two", True, None),
        ("dies", False, died),
        ("three", True, None),
        ("dies", False, died),
    ]


def test_an_op_that_hangs_is_ended(tmp_path):
    found = reports_of(tmp_path, "hangs", "one", limit_s=3)
    assert found == [("hangs", False, "no answer in 3 s"), ("one", True, None)]


def test_what_no_time_was_left_for_is_reported_as_failed(tmp_path):
    found = reports_of(tmp_path, "one", "two", budget_s=-1)
    assert found == [("one", False, "no time was left"), ("two", False, "no time was left")]


def case(native, reference, **tolerances: float) -> kernel_cases.Case:
    args = (torch.tensor([1.0, 2.0, float("nan")]),)
    return kernel_cases.Case("3", native, reference, args, 24, **tolerances)


def test_values_are_compared_within_the_tolerance_of_the_case():
    def near(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-5)

    measured = kernel_checks.measure(case(near, torch.clone, rtol=1e-4), CPU)
    assert measured["max_rel_difference"] == pytest.approx(1e-5, rel=0.01)
    assert measured["max_abs_difference"] == pytest.approx(2e-5, rel=0.01)
    with pytest.raises(AssertionError, match="not close"):
        kernel_checks.measure(case(near, torch.clone, rtol=1e-6), CPU)
    with pytest.raises(AssertionError, match="not equal"):
        kernel_checks.measure(case(near, torch.clone), CPU)


def test_a_result_that_changes_from_call_to_call_is_noticed():
    calls: list[int] = []

    def drifting(x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return x + 1e-7 * len(calls)

    with pytest.raises(AssertionError, match="different bits"):
        kernel_checks.measure(case(drifting, torch.clone, rtol=1e-3, atol=1e-3), CPU)


def test_an_op_without_a_kernel_for_the_device_fails():
    report = kernel_checks.check_op("no_such_op", CPU)
    assert not report["ok"]
    assert "no_such_op" in report["error"] or "no kernel for cpu" in report["error"]
