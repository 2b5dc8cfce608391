"""Whole runs with ``precision.fp8``: what is active is told and kept, what cannot be is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.data.recorded import recorded_path, write_samples
from tests.e2e.conftest import Inputs, Launch
from tests.helpers.samples import random_samples

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TEXT = "fp8 blockwise e4m3, scales f32"
CRITIC = ["algo.advantage.name=gae", "critic.lr=1.0e-4"]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "rollouts"
    write_samples(recorded_path(folder, 1), random_samples(8, 4, seed=1))
    return folder


def test_a_run_says_what_is_in_fp8_of_every_model(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path, recorded: Path
) -> None:
    fp8 = "precision={dtype: bf16, fp8: {backend: emulated}}"
    settings = ["run.steps=1", "optim.warmup_steps=0", fp8, *CRITIC]
    run = launch(inputs.train_only(tmp_path / "run", recorded, *settings))
    assert run.wait() == 0, run.text()
    found = json.loads((tmp_path / "run" / "fp8.json").read_text())
    assert set(found) == {"megatron", "critic"}
    for name, report in found.items():
        plain = {kind for kind, precisions in report.items() if list(precisions) == ["bf16"]}
        assert plain == {"embedding.word_embeddings", "output_layer", "mlp.router"}, name
        rest = [list(report[kind]) for kind in report.keys() - plain]
        assert rest and all(precisions == [TEXT] for precisions in rest), name
        line = f"{name}: bf16: "
        assert line in run.text() and line in (tmp_path / "run/logs/rank_0.log").read_text()
        assert line not in (tmp_path / "run/logs/rank_1.log").read_text()


def test_fp8_that_this_machine_has_not_is_refused_before_a_start(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path, recorded: Path
) -> None:
    settings = ["run.steps=1", "precision={dtype: bf16, fp8: {}}"]
    run = launch(inputs.train_only(tmp_path / "run", recorded, *settings))
    assert run.wait() != 0
    assert "precision.fp8.backend: found te; accepted: emulated, or " in run.text()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
