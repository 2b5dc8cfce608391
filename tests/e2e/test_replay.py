"""A run that trains with the experts its server chose, and what becomes of it with others'."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.recorded import read_samples, recorded_path, write_samples
from tests.e2e.conftest import Inputs, Launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

Start = Callable[..., Launch]
R3 = "moe.routing_replay=rollout"


def test_log_probs_agree_with_the_servers_routing_and_not_with_others(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = launch(inputs.rl(run, "run.steps=1", "monitor.record_rollouts=true", R3))
    assert first.wait() == 0, first.text()
    (live,) = [m for m in first.metrics() if m["step"] == 1]
    # fp32 on both sides: the server's choices are the trainer's, but for the updates of the step
    assert live["moe/replay_changed"] < 0.01
    assert live["mismatch/max_abs_logprob_diff"] < 2e-5

    right = trained_from(launch, inputs, run / "rollouts", tmp_path / "right")
    assert right["moe/replay_changed"] < 0.01
    assert right["mismatch/max_abs_logprob_diff"] < 2e-5

    permuted = tmp_path / "permuted"
    for how in ("layer", "token"):
        samples = [
            replace(s, routing=np.roll(s.routing, 1, axis=1 if how == "layer" else 0))
            for s in read_samples(recorded_path(run / "rollouts", 1))
            if s.routing is not None
        ]
        write_samples(recorded_path(permuted / how, 1), samples)
        wrong = trained_from(launch, inputs, permuted / how, tmp_path / how)
        assert wrong["moe/replay_changed"] > 0.3
        assert wrong["mismatch/max_abs_logprob_diff"] > 1e-2
        k3 = "mismatch/kl_rollout_train_k3"
        assert wrong[k3] > 100 * abs(right[k3]), (wrong[k3], right[k3])


def trained_from(launch: Start, inputs: Inputs, recorded: Path, run: Path) -> dict[str, Any]:
    started = launch(inputs.train_only(run, recorded, "run.steps=1", R3))
    assert started.wait() == 0, started.text()
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def test_a_recording_without_routing_is_refused(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    first = launch(inputs.rl(tmp_path / "run", "run.steps=1", "monitor.record_rollouts=true"))
    assert first.wait() == 0, first.text()
    recorded = tmp_path / "run" / "rollouts"
    started = launch(inputs.train_only(tmp_path / "again", recorded, "run.steps=1", R3))
    assert started.wait() != 0
    assert "has no routing; accepted: that of 4 MoE layers" in started.text()
    assert "moe.routing_replay=rollout" in started.text()
