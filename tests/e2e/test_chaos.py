"""Servers and collectors that are killed and hung while a run samples and syncs cost it time, and
nothing else.
"""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.books import Balance, read_books
from tests.e2e.chaos import DEEDS, Chaos
from tests.e2e.claims import false_claims
from tests.e2e.conftest import Inputs, Launch

pytestmark = pytest.mark.dist

Start = Callable[..., Launch]

FLEET = [
    "rollout.servers=2",
    "rollout.max_running=64",
    "rollout.probe_every_s=1",
    "rollout.probe_timeout_s=4",
    "on_failure={servers: restart, collectors: restart, max_restarts: 100}",
    "eval.every=1000",
    "sync.timeout_s=20",
    "data.samples_per_prompt=4",
]
KEPT = ["monitor.record_rollouts=true", "checkpoint={every: 1, keep: 1000}"]


def books_of(run: Launch, steps: int, groups: int) -> Balance:
    """They balance, every step trained whole groups, and every id is there once."""
    balance = read_books(run.run / "books.jsonl")
    assert balance.balanced, balance.out
    everything = Counter(s for serials in balance.ended.values() for s in serials)
    assert set(everything.values()) == {1}
    assert sorted(everything) == list(range(len(everything)))
    assert len(balance.ended["trained"]) == steps * groups
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == list(range(steps + 1))
    norms = [m["optim/grad_norm"] for m in metrics[1:]]
    assert np.isfinite(norms).all() and max(norms) > 0
    return balance


def assert_no_token_lies(run: Launch, hf: Path) -> None:
    """No server sampled by other weights than it says. Samples of one version are compared with the
    trainer's own log-probs, to rounding; where a step has older ones, all with those of the weights
    that they claim, from the checkpoints of the run (`KEPT`).
    """
    metrics = run.metrics()[1:]
    for m in metrics:
        if m["staleness/max"] == 0:
            assert m["mismatch/max_abs_logprob_diff"] < 2e-5, m
        assert m.get("servers/drifting", 0) == 0, m
    if any(m["staleness/max"] for m in metrics):
        assert false_claims(run.run, hf) == []


def test_a_run_outlives_servers_killed_in_flight_and_in_a_push(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    settings = ["run.steps=8", "rollout.max_new_tokens=20"]
    run = launch(inputs.rl(tmp_path / "run", *settings, *FLEET))
    run.wait_for_steps()
    chaos = Chaos(run, random.Random(1), (0.0, 0.2), {"kill in flight": 1})
    chaos.rage(120, most=1)
    again = Chaos(run, random.Random(2), (0.0, 0.2), {"kill syncing": 1})
    again.rage(120, most=1)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    balance = books_of(run, 8, 8)
    assert not balance.ended["failed"]
    assert_no_token_lies(run, inputs.hf)
    assert chaos.deeds + again.deeds == ["kill in flight", "kill syncing"], run.text()
    assert (run.run / "logs/rank_0.log").read_text().count("signal SIGKILL") >= 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("schedule", ["synchronous", "one_step_off", "asynchronous"])
@pytest.mark.parametrize("seed", [1, 2])
def test_chaos_for_the_length_of_a_run(
    launch: Start, inputs: Inputs, tmp_path: Path, schedule: str, seed: int
) -> None:
    steps = 80
    settings = [f"run.steps={steps}", f"rollout.schedule={schedule}", *FLEET, *KEPT]
    run = launch(inputs.rl(tmp_path / "run", *settings))
    run.wait_for_steps()
    named = {"kill in flight", "kill syncing"}
    weights = {kind: 2 if kind in named else 1 for kind in DEEDS}
    chaos = Chaos(run, random.Random(seed), (0.0, 2.0), weights)
    chaos.rage(900)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    balance = books_of(run, steps, 8)
    assert_no_token_lies(run, inputs.hf)
    print(Counter(chaos.deeds), {fate: len(serials) for fate, serials in balance.ended.items()})
    assert not balance.ended["failed"]
    assert schedule != "synchronous" or not balance.ended["expired"]
    assert named < set(chaos.deeds)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["synchronous", "one_step_off"])
def test_the_only_server_may_die_in_steps_pushes_and_evaluations(
    launch: Start, inputs: Inputs, tmp_path: Path, schedule: str
) -> None:
    """It comes back into them, also where the weights lie in host memory at that moment."""
    settings = ["run.steps=12", f"rollout.schedule={schedule}", "memory.offload=idle"]
    settings += ["optim.distributed=true", *FLEET, "rollout.servers=1", "eval.every=1", *KEPT]
    run = launch(inputs.rl(tmp_path / "run", *settings))
    run.wait_for_steps()
    chaos = Chaos(run, random.Random(3), (1.0, 4.0), {"kill all": 1})
    chaos.rage(240, most=6)
    assert run.wait() == 0, run.text()
    run.assert_nothing_left()
    books_of(run, 12, 8)
    assert_no_token_lies(run, inputs.hf)
    evaluated = [m["step"] for m in run.metrics() if "eval/accuracy" in m]
    assert evaluated == list(range(13))
    assert len(chaos.deeds) >= 3
