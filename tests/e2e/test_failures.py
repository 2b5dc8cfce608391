"""A run that cannot go on ends whole, soon, and says why; a stopped one keeps its work."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs, Launch

pytestmark = pytest.mark.dist

Start = Callable[..., Launch]
LIMIT_S = 20.0


def ends_soon(run: Launch) -> int:
    begin = time.monotonic()
    code = run.wait(LIMIT_S * 3)
    assert time.monotonic() - begin < LIMIT_S, run.text()
    run.assert_nothing_left()
    return code


def test_a_server_that_dies_ends_the_run_and_is_named(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    run = launch(inputs.rl(tmp_path / "run", "run.steps=500", "eval.every=500"))
    run.wait_for_steps()
    run.server().kill()
    assert ends_soon(run) == 1
    assert "ServerError: server 0 died: signal SIGKILL" in run.text()
    assert run.text().count("failed first") == 1


def test_sigterm_finishes_the_step_and_saves_it(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    run = launch(inputs.sft(tmp_path / "run", "run.steps=5000"))
    run.wait_for_steps()
    os.kill(run.process.pid, signal.SIGTERM)
    assert ends_soon(run) == 128 + signal.SIGTERM
    last = run.metrics()[-1]["step"]
    assert (run.run / f"checkpoints/step_{last}/loop.json").is_file()
    assert "run.resume=true" in run.text()


def test_a_disk_that_refuses_a_checkpoint_loses_nothing(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    """No file may grow beyond 1 MB from the second start on, as on a full disk or at a quota."""
    settings = ["run.steps=2", "checkpoint.every=2"]
    first = launch(inputs.sft(tmp_path / "run", *settings))
    assert first.wait() == 0, first.text()
    settings = ["run.steps=4", "run.resume=true"]
    limited = ("bash", "-c", 'ulimit -f 1000 && exec "$@"', "limited")
    second = launch(inputs.sft(tmp_path / "run", *settings), wrap=limited)
    assert ends_soon_after_start(second) == 1
    assert "older checkpoints are untouched" in second.text(), second.text()
    assert [p.name for p in (second.run / "checkpoints").glob("step_*[0-9]")] == ["step_2"]
    third = launch(inputs.sft(tmp_path / "run", *settings))
    assert third.wait() == 0, third.text()
    assert (third.run / "checkpoints/step_4/loop.json").is_file()


def ends_soon_after_start(run: Launch) -> int:
    code = run.wait(120)
    run.assert_nothing_left()
    return code


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_ends_the_run_and_is_named(
    launch: Start, inputs: Inputs, tmp_path: Path, number: signal.Signals
) -> None:
    run = launch(inputs.rl(tmp_path / "run", "run.steps=500", "eval.every=500"))
    run.wait_for_steps()
    run.rank(1).send_signal(number)
    assert ends_soon(run) == 1
    assert f"rank 1 was ended by signal {int(number)}" in run.text(), run.text()


@pytest.mark.slow
def test_ctrl_c_ends_like_sigterm(launch: Start, inputs: Inputs, tmp_path: Path) -> None:
    run = launch(inputs.rl(tmp_path / "run", "run.steps=500", "eval.every=500"))
    run.wait_for_steps()
    os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    assert ends_soon(run) == 128 + signal.SIGINT
    assert "failed first" not in run.text()


@pytest.mark.slow
def test_sigterm_while_starting_ends_it(launch: Start, inputs: Inputs, tmp_path: Path) -> None:
    run = launch(inputs.rl(tmp_path / "run", "run.steps=500", "eval.every=500"))
    deadline = time.monotonic() + 60
    while not any("megarl.train" in p.cmdline() for p in run.processes()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(run.process.pid, signal.SIGTERM)
    assert ends_soon(run) == 128 + signal.SIGTERM
