"""What belongs together runs in one process when the tests are run in several."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests.helpers.workers import pytest_collection_modifyitems, pytest_xdist_make_scheduler
"""
TESTS = """
import pathlib
import pytest

@pytest.mark.parametrize("k", range(8))
def test_it(k, worker_id, request):
    with open({out!r}, "a") as out:
        print(request.path.name, worker_id, file=out)
"""


def test_a_files_tests_run_in_one_process_and_files_in_several(tmp_path: Path) -> None:
    """Those of all that need the same server, too."""
    out, files = tmp_path / "out", ["a", "b", "c", "sglang/d", "sglang/e"]
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in files:
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"test_{path.name}.py").write_text(TESTS.format(out=str(out)))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2"]
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, "-c", os.devnull, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [line.split() for line in out.read_text().splitlines()]
    assert len(ran) == 8 * len(files)
    where = {file: {worker for name, worker in ran if name == file} for file, _ in ran}
    assert len(where) == len(files) and all(len(workers) == 1 for workers in where.values())
    assert where["test_d.py"] == where["test_e.py"] and ran[0][0] in ("test_a.py", "test_d.py")
    assert len({worker for _, worker in ran}) == 2
