"""How `make test-all` comes by the tests of this folder: in an environment of their own."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "tools" / "setup_te.sh"
NOT_HERE = 3  # what it says by its exit code


def test_a_machine_that_cannot_compile_it_is_told_why(tmp_path: Path) -> None:
    """Here by a toolkit of another release."""
    toolkit = tmp_path / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "include").mkdir()
    (toolkit / "include" / "cuda.h").touch()
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.4, V12.4.131\n")
    nvcc.chmod(0o755)
    env = {**os.environ, "CUDA_HOME": str(toolkit), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env.pop("MEGARL_TE_VENV", None)
    done = subprocess.run([SETUP], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == NOT_HERE
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        f"[te] not possible here: {toolkit} is CUDA 12.4; 13 is needed, which torch 2.14.1 is "
        "built with"
    )


@pytest.mark.slow
@pytest.mark.timeout(5400)  # the first time it is compiled
def test_the_tests_with_transformer_engine_pass() -> None:
    command = [SETUP, "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/te"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode == NOT_HERE:
        reason = said.strip().splitlines()[-1]
        if os.environ.get("MEGARL_REQUIRE_TE") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    assert done.returncode == 0, said[-8000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 20, said[-8000:]
