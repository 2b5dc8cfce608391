"""The tests that need SGLang may not silently stay away where they are required."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_other(): ...

@pytest.mark.sglang
def test_runs(): ...

@pytest.mark.sglang
def test_skips():
    pytest.skip("no server here")

@pytest.mark.sglang
@pytest.mark.skip(reason="not today")
def test_is_marked(): ...
"""


@pytest.mark.parametrize(
    ("chosen", "required", "workers", "status", "words"),
    [
        ("other or runs", "1", 0, 0, "2 passed"),
        ("other or runs", "1", 2, 0, "2 passed"),
        ("runs or skips", "1", 0, 1, "no server here"),
        ("runs or marked", "1", 2, 1, "not today"),
        ("other", "1", 0, 1, "no test with a real SGLang server passed"),
        ("other", "1", 2, 1, "no test with a real SGLang server passed"),
        ("other or skips or marked", "0", 0, 0, "2 skipped"),
    ],
)
def test_a_required_test_that_does_not_run_fails_the_session(
    tmp_path: Path, chosen: str, required: str, workers: int, status: int, words: str
) -> None:
    file = tmp_path / "test_made_up.py"
    file.write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.required", f"-n{workers}"]
    done = subprocess.run(
        [*command, "-k", chosen, "--rootdir", tmp_path, "-c", os.devnull, file],
        env={**os.environ, "MEGARL_REQUIRE_SGLANG": required, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status and words in done.stdout, done.stdout + done.stderr
