"""PPO as a whole: the critic learns beside the actor, is saved and goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs, Launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_ppo_trains_reports_and_resumes(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def start(*overrides: str) -> list[dict[str, float]]:
        # the preset replaces quickstart's algorithm, its two minibatches included
        again = ("critic.lr=1e-3", "algo.minibatches=2")
        quickstart, *settings = inputs.rl(run, *again, *overrides)
        started = launch([quickstart, "configs/algos/ppo.yaml", *settings, "eval.every=2"])
        assert started.wait() == 0, started.text()
        started.assert_nothing_left()
        metrics = started.metrics()
        assert [m["sync/version"] for m in metrics] == [m["step"] for m in metrics]
        return metrics

    metrics = start("run.steps=3", "monitor.record_rollouts=true")
    assert metrics[1]["value/mean"] == 0.0
    for m in metrics[1:]:
        assert m["mismatch/max_abs_logprob_diff"] < 2e-5, m
        assert m["critic/grad_norm"] > 0 and m["critic/skipped"] == 0
        assert {"time/values", "time/train_critic", "value/clipfrac"} < m.keys()
    # the warm-up of two steps is the critic's, too
    assert [m["critic/lr"] for m in metrics[1:]] == pytest.approx([1e-3] * 3)
    assert metrics[3]["value/mean"] != 0.0
    assert (run / "checkpoints/step_3/critic/metadata.json").is_file()

    resumed = start("run.steps=4", "run.resume=true", "monitor.record_rollouts=true")
    assert [m["step"] for m in resumed] == [0, 1, 2, 3, 4]

    # the same four steps without a stop, to the last bit
    replay = inputs.train_only(tmp_path / "replay", run / "rollouts", "run.steps=4")
    started = launch(["configs/algos/ppo.yaml", *replay[1:], "critic.lr=1e-3"])
    assert started.wait() == 0, started.text()
    assert [m["step"] for m in started.metrics()] == [1, 2, 3, 4]
    for m in started.metrics():
        for name in ("policy/loss", "value/loss", "value/explained_variance", "critic/grad_norm"):
            assert m[name] == resumed[int(m["step"])][name], (m["step"], name)
