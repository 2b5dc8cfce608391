"""What tools/verify_gpu.py does with every op, and the process in which it does it.

python tools/kernel_checks.py cpu|cuda OP...     one line of JSON an op; MEGARL_LIBRARY is set
"""

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

Call = Callable[[], object]
Report = dict[str, Any]
WORKER = (sys.executable, __file__)
_TAIL = 3000  # characters of what an op that died has printed


# --- in the process that asked --------------------------------------------------------------------


def run_ops(
    library: Path,
    device: str,
    *,
    op_limit_s: float,
    until: float,
    only: Sequence[str] | None = None,
    worker: Sequence[str] = WORKER,
) -> Iterator[Report]:
    """A report an op. ``until``: on time.monotonic's clock, after which no op is started."""
    environment = os.environ | {"MEGARL_LIBRARY": str(library), "MEGARL_OPS": "native"}
    waiting = list(only) if only else _names(environment)
    command = [*worker, device]
    while waiting:
        left = until - time.monotonic()
        if left <= 0:
            yield from ({"op": op, "ok": False, "error": "no time was left"} for op in waiting)
            return
        for report in _reports(command, list(waiting), environment, op_limit_s, until):
            waiting.remove(report["op"])
            yield report


def _names(environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        WORKER, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the library does not load: {done.stderr[-_TAIL:]}")
    return done.stdout.split()


def _reports(
    command: list[str],
    ops: Sequence[str],
    environment: dict[str, str],
    limit_s: float,
    until: float,
) -> Iterator[Report]:
    """Of one process: up to all ``ops``, and no more after one that failed."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, *ops],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            for op in ops:
                wait = max(1.0, min(limit_s, until - time.monotonic()))
                report, going_on = _next(op, lines, wait, process, errors)
                yield report
                if not going_on:
                    return
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # a device that hangs may hold on to it
                process.wait(timeout=10)


def _next(
    op: str, lines: "queue.Queue[str]", wait_s: float, process: Any, errors: IO[str]
) -> tuple[Report, bool]:
    """The op's report, and whether the process does the next one."""
    try:
        line = lines.get(timeout=wait_s)
    except queue.Empty:
        return {"op": op, "ok": False, "error": f"no answer in {wait_s:.0f} s"}, False
    if line:
        report: Report = json.loads(line)
        return report, bool(report["ok"])
    process.wait()
    errors.seek(0)
    said = errors.read()[-_TAIL:]
    return {"op": op, "ok": False, "error": f"ended with code {process.returncode}: {said}"}, False


def _read(stream: IO[str], lines: "queue.Queue[str]") -> None:
    """Lines as they come, and an empty one at the end."""
    for line in stream:
        lines.put(line)
    lines.put("")


# --- in the process of the ops --------------------------------------------------------------------


def check_op(op: str, device: Any) -> Report:
    """All of verify_gpu.py's four steps; what fails is in ``error``."""
    from kernel_cases import CASES, REALISTIC, SMALL

    from megarl.ops._native import native_devices
    from megarl.ops._selfcheck import checked_ops, run_check

    report: Report = {"op": op, "ok": False, "error": None}
    try:
        if device.type not in native_devices(op):
            raise AssertionError(f"the library has no kernel for {device.type}")
        if op in checked_ops():
            run_check(op, device)
        report["self_check"] = "passed" if op in checked_ops() else "part of another op's"
        if op in CASES:
            report |= measure(CASES[op](SMALL if device.type == "cpu" else REALISTIC), device)
        else:
            report["note"] = "no case of a realistic size"
        report["ok"] = True
    except Exception as e:
        report["error"] = f"{type(e).__name__}: {e}"
    return report


def measure(case: Any, device: Any) -> Report:
    """Raises AssertionError for values that are not the reference's, or not the same twice."""
    import torch

    here = case.on(device)
    first, again = _flat(case.native(*here)), _flat(case.native(*here))
    assert _bits(first) == _bits(again), "the same call twice gives different bits"
    del again
    expected = _flat(case.reference(*case.args))
    found = [x.cpu() for x in first]
    differences = [difference(f, e) for f, e in zip(found, expected, strict=True)]
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(
            _comparable(one), _comparable(two), rtol=case.rtol, atol=case.atol, equal_nan=True
        )
    native_ms = median_ms(lambda: case.native(*here), device, 30)
    rival = case.rival or case.reference
    torch_ms = median_ms(lambda: rival(*here), device, 10)
    return {
        "size": case.size,
        "deterministic": True,
        "max_abs_difference": max(d[0] for d in differences),
        "max_rel_difference": max(d[1] for d in differences),
        "native_ms": native_ms,
        "torch_ms": torch_ms,
        "speedup": torch_ms / native_ms,
        "bytes": case.num_bytes,
        "gb_per_s": case.num_bytes / native_ms / 1e6,
    }


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def _bits(tensors: list[Any]) -> list[bytes]:
    import torch

    return [x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for x in tensors]


def _comparable(x: Any) -> Any:
    """FP8 has no comparison of its own: its codes."""
    import torch

    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def difference(found: Any, expected: Any) -> tuple[float, float]:
    """The greatest difference, absolute and of the expected magnitude; of values finite in both."""
    import torch

    a, b = found.double(), expected.double()
    both = torch.isfinite(a) & torch.isfinite(b)
    if not bool(both.any()):
        return 0.0, 0.0
    gap = (a - b).abs()[both]
    size = b.abs()[both]
    relative = torch.where(size > 0, gap / size, 0.0)
    return float(gap.max()), float(relative.max())


def median_ms(
    call: Callable[[], object], device: Any, repeats: int, budget_s: float = 5.0
) -> float:
    """Of up to ``repeats`` samples, fewer where they take longer than ``budget_s``. A sample of a
    short call is of several in a row: else it would be the time of a launch.
    """
    call()
    single = elapsed_ms(call, device, 1)
    calls = max(1, min(20, int(2.0 / max(single, 1e-6))))
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < repeats and (not times or time.perf_counter() - start < budget_s):
        times.append(elapsed_ms(call, device, calls))
    return statistics.median(times)


def elapsed_ms(call: Call, device: Any, calls: int) -> float:
    """Of one of ``calls`` in a row."""
    import torch

    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e3 / calls
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(calls):
        call()
    after.record()
    after.synchronize()
    elapsed: float = before.elapsed_time(after)
    return elapsed / calls


def main(arguments: Sequence[str]) -> None:
    """Without arguments: the names of the ops. Stops after an op that failed: the device may be
    left unusable.
    """
    import torch

    from megarl.ops import KERNELS
    from megarl.ops._selfcheck import checked_ops

    if not arguments:
        print(*sorted({*KERNELS, *checked_ops()}))
        return
    device = torch.device(arguments[0])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a kernel prints before it traps goes to the errors
    for op in arguments[1:]:
        report = check_op(op, device)
        print(json.dumps(report), file=answers, flush=True)
        if not report["ok"]:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
