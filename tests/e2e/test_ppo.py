"""PPO as a whole: the critic learns beside the actor, is saved and goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs, Launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

# The critic warms up for a step, by an optimizer of its own; the reference moves after step 2.
SETTINGS = (
    *("critic.lr=1e-3", "critic.warmup_steps=1"),
    "critic.optim={warmup_steps: 4, clip_grad: 0.5, weight_decay: 0.01}",
    *("algo.kl={coef: 0.01, reference_every: 2}", "algo.minibatches=2"),
)


def test_ppo_trains_reports_and_resumes(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    def start(*overrides: str) -> list[dict[str, float]]:
        # the preset replaces quickstart's algorithm, its two minibatches included
        quickstart, *settings = inputs.rl(run, *SETTINGS, *overrides)
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
    # two optimizer steps a step: the critic's learning rate rises over four of its own
    assert [m["critic/lr"] for m in metrics[1:]] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert ["policy/loss" in m for m in metrics[1:]] == [False, True, True]
    assert metrics[3]["value/mean"] != 0.0
    # nothing has moved before step 2, and the reference has followed before step 3
    assert [m["kl/old_policy"] for m in metrics[1:]] == pytest.approx([0, 0, 0], abs=1e-9)
    assert (run / "checkpoints/step_3/critic/metadata.json").is_file()
    assert (run / "checkpoints/step_3/reference/metadata.json").is_file()

    again = ("run.resume=true", "memory.offload=idle", "monitor.record_rollouts=true")
    resumed = start("run.steps=4", *again)
    assert [m["step"] for m in resumed] == [0, 1, 2, 3, 4]
    assert resumed[4]["kl/old_policy"] > 1e-9

    def replay(name: str, *overrides: str) -> list[dict[str, float]]:
        """The same four steps without a stop."""
        given = ("run.steps=4", *SETTINGS, *overrides)
        _, *settings = inputs.train_only(tmp_path / name, run / "rollouts", *given)
        started = launch(["configs/algos/ppo.yaml", *settings])
        assert started.wait() == 0, started.text()
        assert [m["step"] for m in started.metrics()] == [1, 2, 3, 4]
        return started.metrics()

    names = ("value/loss", "value/explained_variance", "critic/grad_norm", "kl/old_policy")
    for m in replay("idle", "memory.offload=idle"):  # wherever models lie, the same bits
        for name in (*names, *(["policy/loss"] if m["step"] > 1 else [])):
            assert m[name] == resumed[int(m["step"])][name], (m["step"], name)
    for m in replay("layout", "critic.parallel={tp: 2}"):
        for name in ("value/loss", "critic/grad_norm"):
            assert m[name] == pytest.approx(resumed[int(m["step"])][name], rel=0.02), (m, name)
