"""The compiled code under AddressSanitizer and UndefinedBehaviorSanitizer: the fuzz and misuse
tests of tests/ops, run again in a copy of the package whose extensions are compiled with both.

A read or write outside of its memory, an overflow or a misaligned access ends the process there,
with a report, where otherwise it may go unnoticed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tools.native_build import (
    DEFAULT,
    BuildError,
    build_host_module,
    build_library,
    host_sources,
    run_all,
)

ROOT = Path(__file__).parents[2]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# -O1: stack traces that one can read, and half the time. Without clones, since a function that the
# loader has to pick is picked before the sanitizer is ready.
FLAGS = [*SANITIZERS, "-DMEGARL_NO_CLONES", "-O1", "-g1", "-fno-omit-frame-pointer"]
# Tests of torch's own machinery and of other processes, and long ones that fuzz nothing.
LEFT_OUT = "not opcheck and not graph_break and not gradcheck and not gpu and not cuda"
LEFT_OUT += " and not absence and not asked_for and not presence and not choice"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def runtime() -> str:
    """The sanitizers' own libraries, which have to be loaded before anything else; and C++'s, whose
    exceptions they watch.
    """
    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so"):
        command = [DEFAULT.cxx, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_file():
            pytest.skip(f"{DEFAULT.cxx} has no {name}")
        found.append(path)
    return ":".join(found)


def sanitized(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "LD_PRELOAD": runtime(),
        # Python itself keeps what it allocates to the end.
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "PYTHONMALLOC": "malloc",  # else small objects are in pools that look like one allocation
        "MEGARL_OPS": "native",
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": str(cwd),
    }
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


PLANTED = """
#include <cstdint>
#include <vector>
extern "C" int64_t past_the_end(int64_t n) {
  std::vector<int64_t> x(n, 1);
  const volatile int64_t* data = x.data();
  return data[n];
}
extern "C" int32_t overflow(int32_t n) { return n + INT32_MAX; }
"""


@pytest.mark.parametrize(
    ("call", "report"),
    [
        ("past_the_end(8)", "AddressSanitizer: heap-buffer-overflow"),
        ("overflow(1)", "runtime error: signed integer overflow"),
    ],
)
def test_what_is_planted_is_found(tmp_path, call, report):
    source, library = tmp_path / "planted.cpp", tmp_path / "planted.so"
    source.write_text(PLANTED)
    run_all([[DEFAULT.cxx, *FLAGS, "-fPIC", "-shared", str(source), "-o", str(library)]], 1)
    code = f"import ctypes; ctypes.CDLL({str(library)!r}).{{}}; print('went on')"
    found = sanitized([sys.executable, "-c", code.format(call)], tmp_path)
    assert found.returncode != 0
    assert report in found.stderr
    assert "went on" not in found.stdout
    fine = sanitized([sys.executable, "-c", code.format("overflow(0)")], tmp_path)
    assert fine.returncode == 0, fine.stderr


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's Python with sanitized extensions."""
    runtime()
    copy = tmp_path_factory.mktemp("sanitized")
    skipped = shutil.ignore_patterns("*.so", "__pycache__")
    for folder in ("megarl", "tests", "tools", "csrc", "build_backend"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", copy)
    try:
        build_library(copy / "megarl" / "_C.abi3.so", flags=FLAGS)
        if host_sources():
            suffix = sysconfig.get_config_var("EXT_SUFFIX")
            build_host_module(copy / "megarl" / f"_host{suffix}", flags=FLAGS)
    except BuildError as e:
        pytest.fail(str(e))
    code = "from megarl.ops import native_library; print(native_library())"
    used = sanitized([sys.executable, "-c", code], copy)
    assert used.stdout.strip() == str(copy / "megarl" / "_C.abi3.so"), used.stderr[-4000:]
    return copy


def test_fuzz_and_misuse_tests_of_the_ops_find_nothing(package):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-k", LEFT_OUT]
    command += ["-p", "no:cacheprovider", "--durations=10", "tests/ops"]
    command += ["--ignore=tests/ops/test_selfcheck.py"]
    run = sanitized(command, package)
    report = (run.stdout + run.stderr)[-6000:]
    assert run.returncode == 0, report
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed and int(passed[1]) > 200, report


def test_every_op_and_variant_of_the_policy_loss_finds_nothing(package):
    run = sanitized([sys.executable, "-m", "tests.ops.work_bits"], package)
    assert run.returncode == 0, run.stderr[-6000:]
    assert len(json.loads(run.stdout)) > 1000
