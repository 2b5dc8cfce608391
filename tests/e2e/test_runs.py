"""The loop as a whole: sample, reward, train, sync, report, checkpoint, resume."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.ops import HOST_OPS, KERNELS, backends
from tests.e2e.conftest import Inputs, Launch

pytestmark = pytest.mark.dist

Start = Callable[..., Launch]

# On top of GSPO: a reference policy, a controller with a state, weights against mismatch, and the
# server's choices of experts
TERMS = [
    "algo.kl.coef=0.05",
    "algo.entropy={name: adaptive, target: 9.0, delta: 0.001}",
    "algo.correction={level: sequence, mode: mask, low: 0.5, high: 2.0}",
    "moe.routing_replay=rollout",
]


def test_a_run_trains_syncs_reports_and_resumes(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    own = f"prompts: {inputs.data}/heldout.jsonl, every: 3, samples_per_prompt: 2"
    sets = f"eval.sets=[{{name: own, {own}, temperature: 1.0, pass_at: [1, 2]}}]"
    settings = ["eval.every=2", sets, "monitor.record_rollouts=true", *TERMS]
    first = launch(inputs.rl(run, "run.steps=3", *settings))
    assert first.wait() == 0, first.text()
    first.assert_nothing_left()
    metrics = first.metrics()
    assert [m["step"] for m in metrics] == [0, 1, 2, 3]
    assert [m["sync/version"] for m in metrics] == [0, 1, 2, 3]
    for m in metrics[1:]:
        # fp32 on both sides: sampler and trainer agree to rounding, so the weights went over
        assert m["mismatch/max_abs_logprob_diff"] < 2e-5, m
        assert m["moe/replay_changed"] < 0.02  # by the updates of the step
        assert 0 < m["policy/entropy"] < np.log(24)
        assert m["optim/grad_norm"] > 0
        assert m["policy/entropy_coef"] == pytest.approx(0.001 * (m["step"] - 1), abs=1e-15)
    # the reference is the model before the first update
    assert abs(metrics[1]["kl/old_policy"]) < 1e-9 < 1e-6 < metrics[3]["kl/old_policy"]
    assert [m["step"] for m in metrics if "eval/accuracy" in m] == [0, 2, 3]
    assert [m["step"] for m in metrics if "eval/own/accuracy" in m] == [0, 3]
    for m in (metrics[0], metrics[3]):
        assert m["eval/own/samples"] == 2 * m["eval/samples"]
        assert m["eval/own/pass@1"] == pytest.approx(m["eval/own/accuracy"])
        assert m["eval/own/pass@1"] <= m["eval/own/pass@2"] <= 2 * m["eval/own/pass@1"]
    assert "<img" in (run / "report.html").read_text()
    samples = [json.loads(s) for s in (run / "samples/step_3.jsonl").read_text().splitlines()]
    assert {s["version"] for s in samples} == {2}  # sampled by the weights after step 2

    assert_ops_are_accounted_for(run, microbatches=12)  # 3 steps, 4 updates each, of a row

    assert_training_again_from_the_recording_repeats(launch, inputs, run, tmp_path / "replay")

    again = launch(inputs.rl(run, "run.steps=3"))
    assert again.wait() != 0
    assert "which already holds a run; accepted: another folder, or run.resume" in again.text()

    resumed = launch(inputs.rl(run, "run.steps=4", "run.resume=true", *settings))
    assert resumed.wait() == 0, resumed.text()
    assert [m["step"] for m in resumed.metrics()] == [0, 1, 2, 3, 4]
    assert resumed.metrics()[-1]["sync/version"] == 4
    assert resumed.metrics()[-1]["policy/entropy_coef"] == pytest.approx(0.003)  # it went on
    assert resumed.metrics()[-1]["kl/old_policy"] > metrics[3]["kl/old_policy"] / 4
    assert resumed.metrics()[-1]["mismatch/max_abs_logprob_diff"] < 2e-5
    assert_prompts_go_on(run, steps=4, per_step=8)
    assert_another_model_does_not_go_on(launch, inputs, run, tmp_path / "another")


def assert_ops_are_accounted_for(run: Path, microbatches: int) -> None:
    """Training runs the compiled ops, and says so."""
    kept = json.loads((run / "ops.json").read_text())
    assert kept["backends"] == backends([*KERNELS, *HOST_OPS], torch.device("cpu"))
    kind = kept["backends"]["policy_loss"]
    assert kept["calls"]["policy_loss"] == {kind: microbatches}
    assert kept["calls"]["logprob_entropy_backward_"] == {kind: microbatches}
    said = (run / "logs/rank_0.log").read_text()
    assert "ops on cpu: native: " in said or kind == "torch"
    assert f"policy_loss {microbatches} {kind}" in said


def assert_training_again_from_the_recording_repeats(
    launch: Start, inputs: Inputs, recorded_run: Path, run: Path
) -> None:
    """``train_only`` from the same weights and rollouts: losses and gradients to the last bit."""
    recording = recorded_run / "rollouts"
    replay = launch(inputs.train_only(run, recording, "run.steps=2", *TERMS))
    assert replay.wait() == 0, replay.text()
    lines = (recorded_run / "metrics.jsonl").read_text().splitlines()
    original = {m["step"]: m for m in map(json.loads, lines)}
    found = replay.metrics()
    assert [m["step"] for m in found] == [1, 2]
    for m in found:
        for name in ("policy/loss", "optim/grad_norm", "policy/entropy", "policy/seq_ratio_min"):
            assert m[name] == original[m["step"]][name], (m["step"], name)


def assert_another_model_does_not_go_on(
    launch: Start, inputs: Inputs, run: Path, folder: Path
) -> None:
    """D5: weights of the same shapes, of the run and of what it started from (its reference)."""
    shutil.copytree(inputs.hf, folder)
    config = json.loads((folder / "config.json").read_text())
    eps = config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 2 * eps}))
    settings = ["run.steps=5", "run.resume=true", "eval.every=2", *TERMS]
    other = launch(inputs.rl(run, *settings, f"model.hf={folder}"))
    assert other.wait() != 0
    assert "different models (2 contradictions)" in other.text()
    for stored in (run / "checkpoints/step_4", inputs.megatron):
        values = f"{eps} in {stored / 'model.json'}, {2 * eps} in {folder / 'config.json'}"
        assert f"norm_eps: {values}" in other.text()
    assert [m["step"] for m in other.metrics()] == [0, 1, 2, 3, 4]


def assert_prompts_go_on(run: Path, *, steps: int, per_step: int) -> None:
    """No prompt twice within the first epoch, also across the stop."""
    seen: list[str] = []
    for step in range(1, steps + 1):
        with np.load(run / f"rollouts/step_{step}.npz", allow_pickle=False) as file:
            seen += sorted(set(file["prompt_id"].tolist()))
    assert len(seen) == len(set(seen)) == steps * per_step


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["{tp: 2}", "{pp: 2}", "{pp: 2, vpp: 2}", "{cp: 2}", "{dp: 2}", "{dp: 2, ep: 2}"],
)
def test_every_layout_runs_by_changing_one_line(
    launch: Start, inputs: Inputs, tmp_path: Path, layout: str
) -> None:
    one_line = tmp_path / "layout.yaml"
    text = Path("configs/quickstart.yaml").read_text()
    line = next(x for x in text.splitlines() if x.startswith("parallel:"))
    configs = Path("configs").absolute()
    text = text.replace(line, f"parallel: {layout}").replace("algos/", f"{configs}/algos/")
    one_line.write_text(text)
    arguments = inputs.rl(tmp_path / "run", "run.steps=3", "eval.every=3")
    started = launch([str(one_line), *arguments[1:]])
    assert started.wait() == 0, started.text()
    metrics = started.metrics()
    assert [m["sync/version"] for m in metrics] == [0, 1, 2, 3]
    assert all(m["mismatch/max_abs_logprob_diff"] < 2e-5 for m in metrics[1:])


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet_and_repeat_each_other(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    """Same seed, other directory, at the same time: the same figures, to the last bit."""
    both = [launch(inputs.rl(tmp_path / n, "run.steps=3", "eval.every=3")) for n in ("a", "b")]
    assert [r.wait() for r in both] == [0, 0], [r.text() for r in both]
    a, b = (r.metrics() for r in both)
    for x, y in zip(a, b, strict=True):
        timed = {k for k in x if k.startswith(("time", "perf/")) or "seconds" in k}
        assert {k: v for k, v in x.items() if k not in timed} == {
            k: v for k, v in y.items() if k not in timed
        }
