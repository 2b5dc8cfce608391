"""One result on every machine: the operators compiled for AVX-512, for AVX2 and for the oldest
x86-64 give the same bits, and so does the library in which the loader chooses among them.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tools.native_build import build_library

ROOT = Path(__file__).parents[2]
# What a CPU must have to run the code, as /proc/cpuinfo spells it.
LEVELS = {
    "x86-64": set(),
    "x86-64-v3": {"avx2", "bmi2", "fma", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="these are levels of x86-64"),
]


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


def run_with(library: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.ops.work_bits"],
        cwd=ROOT,
        env=os.environ
        | {"MEGARL_LIBRARY": str(library), "MEGARL_OPS": "native", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def results(library: Path) -> dict[str, list[str]]:
    run = run_with(library)
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def chosen_by_the_loader(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return results(build_library(tmp_path_factory.mktemp("clones") / "_C.so"))


@pytest.mark.parametrize("level", LEVELS)
def test_builds_for_every_instruction_set_agree_bit_for_bit(level, tmp_path, chosen_by_the_loader):
    missing = LEVELS[level] - cpu_flags()
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    flags = ["-DMEGARL_NO_CLONES", f"-march={level}"]
    found = results(build_library(tmp_path / "_C.so", flags=flags))
    assert len(found) > 1000
    assert found.keys() == chosen_by_the_loader.keys()
    different = [name for name in found if found[name] != chosen_by_the_loader[name]]
    assert not different, f"{len(different)} of {len(found)} calls: {different[:20]}"


def test_a_build_that_contracts_is_refused(tmp_path):
    """A fused multiply-add rounds once where the code says twice: the self-checks notice."""
    missing = LEVELS["x86-64-v3"] - cpu_flags()
    if missing:
        pytest.skip(f"this CPU has no {', '.join(sorted(missing))}")
    flags = ["-DMEGARL_NO_CLONES", "-march=x86-64-v3", "-ffp-contract=fast"]
    run = run_with(build_library(tmp_path / "_C.so", flags=flags))
    assert run.returncode != 0
    assert "does not agree with its reference" in run.stderr
