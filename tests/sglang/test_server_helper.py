"""The server helper itself, with shell scripts in place of SGLang's Python: needs no SGLang."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sglang.server import ServerDidNotStart, SGLangServer

ROOT = Path(__file__).resolve().parents[2]


def fake_venv(folder: Path, script: str) -> Path:
    """An environment whose python is a shell script."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return folder


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path} was never written"
        time.sleep(0.05)
    return path.read_text().strip()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} survived"
        time.sleep(0.05)


def test_a_server_that_dies_is_reported_with_its_status_and_the_end_of_its_log(tmp_path):
    venv = fake_venv(tmp_path / "venv", "echo cannot find the model\nexit 7")
    server = SGLangServer("/no/model", log_path=tmp_path / "log", venv=venv)
    with pytest.raises(ServerDidNotStart, match=r"status 7(.|\n)*cannot find the model"):
        server.start()


def test_a_server_that_never_gets_ready_is_ended_at_the_deadline_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    venv = fake_venv(
        tmp_path / "venv", f"sleep 600 &\necho $! > {pid_file}\necho still loading\nwait"
    )
    server = SGLangServer("/m", log_path=tmp_path / "log", venv=venv, start_timeout_s=1.0)
    with pytest.raises(ServerDidNotStart, match=r"not ready within 1 s(.|\n)*still loading"):
        server.start()
    assert_ends(int(wait_for(pid_file)))


def test_nothing_survives_when_the_process_that_started_the_server_is_killed(tmp_path):
    pid_file, tmp_file = tmp_path / "pid", tmp_path / "tmp"
    venv = fake_venv(
        tmp_path / "venv",
        f"sleep 600 &\necho $TMPDIR > {tmp_file}\necho $! > {pid_file}\nwait",
    )
    start = (
        "from pathlib import Path; from tests.sglang.server import SGLangServer; "
        f"SGLangServer('/m', log_path=Path({str(tmp_path / 'log')!r}), "
        f"venv=Path({str(venv)!r})).start()"
    )
    tests = subprocess.Popen(
        [sys.executable, "-c", start], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        grandchild = int(wait_for(pid_file))
        assert is_running(grandchild)
    finally:
        tests.kill()
        tests.wait()
    assert_ends(grandchild)
    deadline = time.monotonic() + 10
    while Path(wait_for(tmp_file)).exists():
        assert time.monotonic() < deadline, "the server's temporary files were left behind"
        time.sleep(0.05)
