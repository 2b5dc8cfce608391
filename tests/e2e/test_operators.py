"""A whole run with the compiled operators and one with their torch references report the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.data.recorded import recorded_path, write_samples
from megarl.ops import native_devices
from tests.e2e.conftest import Inputs, Launch
from tests.helpers.samples import random_samples

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(not native_devices("policy_loss"), reason="the operators are not built"),
]

STEPS = 3
TERMS = [
    "algo.kl.coef=0.05",
    "algo.entropy={name: adaptive, target: 9.0, delta: 0.001}",
    "algo.correction={level: sequence, mode: mask, low: 0.5, high: 2.0}",
]


@pytest.mark.parametrize("policy", ["{name: gspo}", "{name: sapo}"])
def test_both_report_the_same_metrics_of_recorded_rollouts(
    launch: Callable[..., Launch],
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    recorded = tmp_path / "rollouts"
    for step in range(1, STEPS + 1):
        write_samples(recorded_path(recorded, step), random_samples(8, 4, seed=step))
    found = {}
    for choice in ("native", "torch"):
        monkeypatch.setenv("MEGARL_OPS", choice)
        settings = (f"run.steps={STEPS}", f"algo.policy={policy}", *TERMS)
        run = launch(inputs.train_only(tmp_path / choice, recorded, *settings))
        assert run.wait() == 0, run.text()
        found[choice] = run.metrics()
        said = json.loads((tmp_path / choice / "ops.json").read_text())
        assert set(said["calls"]["policy_loss"]) == {choice}
    assert [m["step"] for m in found["native"]] == list(range(1, STEPS + 1))
    for a, b in zip(found["native"], found["torch"], strict=True):
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        for name, number in b.items():
            if name.startswith(("time", "perf/")) or "seconds" in name:
                continue
            near = pytest.approx(number, rel=1e-4, abs=1e-6) if type(number) is float else number
            assert a[name] == near, (a["step"], name)
