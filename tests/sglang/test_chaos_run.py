"""A whole run whose only server, a real SGLang that the run started, is killed twice: while it has
tokens in flight and while it takes weights. It is started again, gets the weights and goes on.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Inputs, Launch, launch  # noqa: F401 (a fixture)
from tests.e2e.test_chaos import books_of
from tests.rollout.test_sglang import ARGUMENTS
from tests.sglang.conftest import Models
from tests.sglang.server import SUPPORT, VENV, require_sglang

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]
STEPS = 8


def group_of(run: Launch) -> list[psutil.Process]:
    """The server's processes, its scheduler among them."""
    guard = run.server()
    return [guard, *guard.children(recursive=True)]


def kill_when(run: Launch, words: str, seen: int) -> None:
    """SIGKILL to the scheduler, once the log has said ``words`` more than ``seen`` times."""
    log = run.run / "logs/server_0.log"
    deadline = time.monotonic() + 300
    while log.read_text(errors="replace").count(words) <= seen:
        assert time.monotonic() < deadline and run.process.poll() is None, run.text()
        time.sleep(0.02)
    victims = group_of(run)
    os.kill(random.Random(0).choice(victims[1:]).pid, signal.SIGKILL)


def test_the_run_goes_on_with_the_server_that_was_started_again(
    launch: Callable[..., Launch],  # noqa: F811
    tiny_models: Models,
    demo_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_sglang()
    for name, value in (("SGLANG_USE_CPU_ENGINE", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}")
    command = [str(VENV / "bin" / "python"), "-m", "sglang.launch_server"]
    inputs = Inputs(tiny_models.a, Path("null"), demo_data)
    run = launch(
        inputs.rl(
            tmp_path / "run",
            f"run.steps={STEPS}",
            "eval.every=1000",
            "data.samples_per_prompt=2",
            "moe.routing_replay=rollout",
            "rollout.engine=sglang",
            f"rollout.server_command={json.dumps(command)}",
            f"rollout.server_args={json.dumps(ARGUMENTS.split())}",
            "rollout.start_timeout_s=600",
            "rollout.context_length=64",
            "train.row_tokens=256",
            "on_failure={servers: restart, max_restarts: 10}",
        )
    )
    run.wait_for_steps(900)
    boots = {json.loads((run.run / "server_0.json").read_text())["boot"]}
    log = run.run / "logs/server_0.log"
    kill_when(run, "POST /generate", log.read_text(errors="replace").count("POST /generate"))
    deadline = time.monotonic() + 600
    while len(boots) == 1:
        assert time.monotonic() < deadline and run.process.poll() is None, run.text()
        time.sleep(0.5)
        if (run.run / "server_0.json").exists():
            boots.add(json.loads((run.run / "server_0.json").read_text())["boot"])
    updates = "POST /update_weights_from_distributed"
    kill_when(run, updates, log.read_text(errors="replace").count(updates))
    assert run.wait(1200) == 0, run.text()
    run.assert_nothing_left()
    balance = books_of(run, STEPS, 8)
    assert not balance.ended["failed"]
    for m in run.metrics()[1:]:
        assert m["mismatch/max_abs_logprob_diff"] < 2e-5, m  # it never sampled by other weights
