"""R3 from a server's routing to the trainer's metrics, in bf16: a run, and what becomes of its
rollouts when they are trained on without the routing, with it, and with other layers' routing.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.recorded import read_samples, recorded_path, write_samples
from tests.e2e.conftest import Inputs, Launch

K3 = "mismatch/kl_rollout_train_k3"
DIFFERENCE = "mismatch/max_abs_logprob_diff"
# One update, so that every pass of the trainer is with the weights that the server had.
ONE_STEP = [
    *("run.steps=1", "optim.warmup_steps=0", "algo.minibatches=1", "precision.dtype=bf16"),
    "data.samples_per_prompt=8",
]


def check(
    launch: Callable[..., Launch], inputs: Inputs, folder: Path, *rollouts: str
) -> dict[str, dict[str, Any]]:
    """``rollouts``: settings of the servers. Returns every run's metrics."""
    run = folder / "run"
    r3 = "moe.routing_replay=rollout"
    first = launch(inputs.rl(run, "monitor.record_rollouts=true", r3, *ONE_STEP, *rollouts))
    assert first.wait() == 0, first.text()
    found = {"run": _last(first)}
    samples = read_samples(recorded_path(run / "rollouts", 1))
    # every layer takes the choices of the one before
    moved = [replace(s, routing=np.roll(s.routing, 1, axis=1)) for s in samples]  # type: ignore[arg-type]
    for name, given, replay in (
        ("none", samples, "none"),
        ("rollout", samples, "rollout"),
        ("moved", moved, "rollout"),
    ):
        recorded = folder / name / "rollouts"
        write_samples(recorded_path(recorded, 1), given)
        settings = [f"moe.routing_replay={replay}", *ONE_STEP[:-1]]
        again = launch(inputs.train_only(folder / name / "run", recorded, *settings))
        assert again.wait() == 0, again.text()
        found[name] = _last(again)
    for name, metrics in found.items():
        shown = {
            k: f"{metrics[k]:.3g}" for k in (K3, DIFFERENCE, "moe/replay_changed") if k in metrics
        }
        print(name, shown)
    own, replayed, wrong = (found[name] for name in ("none", "rollout", "moved"))
    assert "moe/replay_changed" not in own
    # of all choices some are other ones than the trainer's own, by rounding, and few
    assert 0 < replayed["moe/replay_changed"] < 0.05
    assert found["run"]["moe/replay_changed"] == replayed["moe/replay_changed"]
    assert found["run"][K3] == replayed[K3]
    assert replayed[K3] < own[K3] / 4
    assert replayed[DIFFERENCE] < own[DIFFERENCE] / 4
    assert wrong["moe/replay_changed"] > 0.3
    assert wrong[K3] > 10 * own[K3]
    return found


def _last(run: Launch) -> dict[str, Any]:
    last: dict[str, Any] = json.loads((run.run / "metrics.jsonl").read_text().splitlines()[-1])
    return last
