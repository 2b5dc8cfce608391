"""What is computed does not depend on the compiled operators: the same tests pass without them."""

import os
import subprocess
import sys

import pytest

from megarl.ops import native_library
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native_library() is None, reason="the references are what runs anyway"),
]


def with_the_references(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"MEGARL_OPS": "torch"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.mark.dist
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("tests", ["tests/algos", "tests/conformance"])
def test_objectives_pass_their_tests(tests):
    run = with_the_references("pytest", "-q", "-p", "no:cacheprovider", tests)
    assert run.returncode == 0, run.stdout[-4000:]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_conformance_command_passes(tmp_path, dtype):
    run = with_the_references(
        *("megarl.conformance", "tests/vectors/objectives.json", "--backend", "torch"),
        *("--dtype", dtype, "--out", str(tmp_path / "results.json")),
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
