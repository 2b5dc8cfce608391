"""A run that trains with the experts its server chose, and what becomes of it with others'."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.data.recorded import read_samples, recorded_path, write_samples
from megarl.types import Sample
from tests.e2e.conftest import Inputs, Launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SETTINGS = ["run.steps=1", "optim.warmup_steps=0", "moe.routing_replay=rollout"]
K3 = "mismatch/kl_rollout_train_k3"


def test_log_probs_agree_with_the_servers_routing_and_not_with_others(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    first = launch(inputs.rl(run, "monitor.record_rollouts=true", *SETTINGS))
    assert first.wait() == 0, first.text()
    assert_agrees(next(m for m in first.metrics() if m["step"] == 1))

    def again(name: str, samples: Sequence[Sample]) -> Launch:
        """Training from ``samples`` as a recording."""
        recorded = tmp_path / name / "rollouts"
        write_samples(recorded_path(recorded, 1), samples)
        started = launch(inputs.train_only(tmp_path / name / "run", recorded, *SETTINGS))
        started.wait()
        return started

    samples = read_samples(recorded_path(run / "rollouts", 1))
    right = metrics_of(again("right", samples))
    assert_agrees(right)
    # every layer takes the choices of the one before
    moved = [replace(s, routing=np.roll(s.routing, 1, axis=1)) for s in samples]  # type: ignore[arg-type]
    wrong = metrics_of(again("moved", moved))
    assert wrong["moe/replay_changed"] > 0.3
    assert wrong["mismatch/max_abs_logprob_diff"] > 1e-2
    assert wrong[K3] > 100 * abs(right[K3]), (wrong[K3], right[K3])

    refused = again("without", [replace(s, routing=None) for s in samples])
    assert refused.process.returncode != 0
    assert "has no routing; accepted: that of 4 MoE layers" in refused.text()
    assert "moe.routing_replay=rollout" in refused.text()


def assert_agrees(metrics: dict[str, Any]) -> None:
    """fp32 on both sides: the server's choices are the trainer's, but for the step's updates."""
    assert metrics["moe/replay_changed"] < 0.02, metrics
    assert metrics["mismatch/max_abs_logprob_diff"] < 2e-5, metrics


def metrics_of(started: Launch) -> dict[str, Any]:
    assert started.process.returncode == 0, started.text()
    last: dict[str, Any] = json.loads((started.run / "metrics.jsonl").read_text().splitlines()[-1])
    return last
