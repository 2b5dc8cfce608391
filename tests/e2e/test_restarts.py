"""A trainer that is killed goes on from its checkpoint, beside servers that stay."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs, Launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]


def server_pids(run: Path) -> dict[str, int]:
    return {f.stem: json.loads(f.read_text())["pid"] for f in run.glob("server_*.json")}


def test_damaged_data_ends_the_run_at_its_first_start(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path
) -> None:
    """Ranks exit with 1 whatever fails, and so does torchrun: what counts is what they wrote."""
    damaged = tmp_path / "damaged.jsonl"
    lines = (inputs.data / "warmup.jsonl").read_text().splitlines()
    damaged.write_text("\n".join([lines[0], lines[1][:20], *lines[2:40]]))
    restart = "on_failure={trainer: restart, max_restarts: 3}"
    run = launch(inputs.sft(tmp_path / "run", f"data.demonstrations={damaged}", restart))
    assert run.wait(300) == 1, run.text()
    assert "a restart does not mend this (DataError)" in run.text()
    assert "damaged.jsonl:2: not JSON" in run.text() and "restart 1 of 3" not in run.text()
    assert len(list((run.run / "errors").iterdir())) == 1
    run.assert_nothing_left()


def test_a_killed_trainer_goes_on_beside_the_same_servers(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run = launch(
        inputs.rl(
            folder,
            "run.steps=8",
            "eval.every=500",
            "checkpoint.every=2",
            "rollout.servers=2",
            "on_failure={trainer: restart, servers: restart, max_restarts: 2}",
        )
    )
    checkpoint = folder / "checkpoints" / "step_2" / "loop.json"
    deadline = time.monotonic() + 300
    while not checkpoint.is_file():
        assert run.process.poll() is None, run.text()
        assert time.monotonic() < deadline, run.text()
        time.sleep(0.1)
    before = server_pids(folder)
    assert len(before) == 2
    run.rank(0).kill()
    while "restart 1 of 2" not in run.text():
        assert run.process.poll() is None and time.monotonic() < deadline, run.text()
        time.sleep(0.1)
    assert server_pids(folder) == before
    assert run.wait(600) == 0, run.text()
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(9))  # each once: what came after the checkpoint was done again
    assert [line["sync/version"] for line in run.metrics()] == steps
    run.assert_nothing_left()
    assert server_pids(folder) == {}
    log = (folder / "logs" / "servers.log").read_text()
    assert "restarts left" not in log, log  # no server was started again
