"""launch/slurm/train.sbatch: with stand-ins for Slurm everywhere, for real where it answers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import JOB, ROOT, SCRIPT, Cluster, option


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_the_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_slurm_reads_these_options() -> None:
    """It stops reading at the first command."""
    lines = SCRIPT.read_text().splitlines()
    head = lines[: next(i for i, line in enumerate(lines) if line and not line.startswith("#"))]
    options = {line.removeprefix("#SBATCH ") for line in head if line.startswith("#SBATCH ")}
    assert options >= {
        "--nodes=2",
        "--ntasks-per-node=1",
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--no-requeue",
    }
    assert sum("#SBATCH" in line for line in lines) == len(options)


def test_arguments_reach_every_torchrun_as_they_were_given(cluster: Cluster) -> None:
    given = [
        "a config.yaml",
        'data.prompts="x y"',
        "run.dir=$HOME/*",
        "optim.betas=[0.9, 1]",
        "",
        "it's",
    ]
    code, errors = cluster.submit(*given)
    assert code == 0, errors
    launches = cluster.calls("torch.distributed.run")
    assert len(launches) == 2
    for call in launches:
        assert call[call.index("megarl.train") + 1 :] == given
    (check,) = cluster.calls("check")
    assert check[-len(given) - 2 :] == ["--shell", "--nodes=2", *given]


def test_ranks_are_spread_evenly_and_meet_on_the_first_node(cluster: Cluster) -> None:
    assert cluster.submit("c.yaml", ranks=6)[0] == 0
    launches = cluster.calls("torch.distributed.run")
    assert sorted(option(call, "--node-rank") for call in launches) == ["0", "1"]
    for call in launches:
        assert option(call, "--nproc-per-node") == "3"
        assert option(call, "--nnodes") == "2"
        assert option(call, "--master-addr") == "10.0.0.7"
        assert 10000 <= int(option(call, "--master-port")) < 32768
        assert option(call, "--rdzv-id") == f"slurm-{JOB}-0"
    (step,) = cluster.calls("bash")
    assert option(step, "--export") == "ALL"  # a comma in a value would be taken for the next name


def test_a_world_size_that_does_not_divide_is_refused(cluster: Cluster) -> None:
    code, errors = cluster.submit("c.yaml", ranks=3)
    assert code == 2
    assert re.search(r"\b3 ranks\b.*\b2 nodes\b", errors)
    assert not cluster.calls("torch.distributed.run")


def test_a_failure_is_the_job_s_failure_and_its_first_cause_is_asked_for(cluster: Cluster) -> None:
    code, errors = cluster.submit("c.yaml", STATUS="1")
    assert code == 1
    assert str(cluster.run_dir) in errors
    (asked,) = cluster.calls("first-error")
    given = asked[asked.index("first-error") + 1 :]
    assert given == [str(cluster.run_dir), "--launch", f"slurm-{JOB}-0"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_goes_to_the_step_and_the_job_waits(
    cluster: Cluster, number: signal.Signals
) -> None:
    job = cluster.start("c.yaml", SECONDS_OF_TRAINING="1", STATUS="1")
    wait_until(lambda: bool(cluster.calls("torch.distributed.run")), 20)
    job.send_signal(number)
    assert job.wait(timeout=20) == 128 + number
    assert cluster.calls("scancel") == [["scancel", "--signal=URG", f"{JOB}.0"]]
    assert cluster.calls("first-error")  # after the ranks have ended, not before


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)


@pytest.fixture
def two_nodes() -> None:
    """Skips where Slurm has no two idle nodes, or fails if MEGARL_REQUIRE_SLURM=1."""
    reason = "sinfo is not installed"
    if shutil.which("sinfo"):
        command = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
        nodes = len(set(asked.stdout.split()))
        if asked.returncode == 0 and nodes >= 2:
            return
        reason = f"sinfo finds {nodes} idle nodes of 2: {asked.stderr.strip()}"
    if os.environ.get("MEGARL_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.mark.slurm
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("two_nodes")
def test_a_run_on_two_nodes_ends_well_and_a_stopped_one_is_saved(
    tmp_path: Path, tiny_model: Path, demo_data: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    tool = str(ROOT / "tools" / "convert_hf_to_megatron.py")
    convert = [sys.executable, tool, str(tiny_model), str(checkpoint)]
    subprocess.run(convert, check=True, timeout=200)
    settings = [
        str(ROOT / "configs" / "quickstart_warmup.yaml"),
        f"model.hf={tiny_model}",
        f"model.load={checkpoint}",
        f"data.demonstrations={demo_data / 'warmup.jsonl'}",
        "data.prompts_per_step=8",
        "optim.warmup_steps=1",
    ]
    done = tmp_path / "a run"
    job = submit(tmp_path, *settings, f"run.dir={done}", "run.steps=2")
    assert ended(job) == ("COMPLETED", "0:0"), output(tmp_path, job)
    assert (done / "checkpoints" / "step_2" / "loop.json").is_file()
    assert {p.name for p in (done / "logs").glob("rank_*")} == {"rank_0.log", "rank_1.log"}
    assert not running(job)

    stopped = tmp_path / "stopped"
    job = submit(tmp_path, *settings, f"run.dir={stopped}", "run.steps=100000")
    metrics = stopped / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, 120)
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    assert ended(job) == ("FAILED", "138:0"), output(tmp_path, job)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert [p.name for p in (stopped / "checkpoints").iterdir()] == [f"step_{steps[-1]}"]
    assert not running(job)


def submit(folder: Path, *arguments: str) -> str:
    """The job's id."""
    options = ["--parsable", "--time=10", f"--output={folder}/%j.out"]
    command = ["sbatch", *options, str(SCRIPT), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.check_output(command, cwd=ROOT, env=environment, text=True).strip()


def ended(job: str) -> tuple[str, str]:
    """State and exit code, once there are final ones."""

    def state() -> tuple[str, str]:
        shown = subprocess.check_output(["scontrol", "show", "job", job], text=True)
        found = re.search(r"JobState=(\w+).*?ExitCode=([\d:]+)", shown, re.DOTALL)
        assert found, shown
        return found[1], found[2]

    wait_until(lambda: state()[0] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), 150)
    return state()


def output(folder: Path, job: str) -> str:
    return (folder / f"{job}.out").read_text()


def running(job: str) -> list[str]:
    """Processes on this machine that still belong to the job."""
    mark = f"SLURM_JOB_ID={job}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found
