"""What emulated FP8 does to whole runs: the mismatch with a server in FP8, and learning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_tiny_model
from tests.e2e.conftest import Inputs, Launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(3600)]

Start = Callable[..., Launch]
ONE_RANK = ["parallel={dp: 1, ep: 1}", "precision.dtype=bf16", "monitor.tensorboard=false"]


def finished(started: Launch) -> list[dict[str, Any]]:
    assert started.wait(timeout_s=1800) == 0, started.text()
    return started.metrics()


# --- mismatch -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its q, k, v, gate and up are whole blocks: trainer and server round the same ones."""
    sizes = ("--layers", "4", "--hidden", "256", "--heads", "2", "--kv-heads", "2")
    sizes += ("--head-dim", "128", "--ffn", "256", "--init-std", "0.06")
    experts = ("--experts", "4", "--moe-ffn", "128", "--dense-layers", "0")
    return make_tiny_model(tmp_path_factory.mktemp("blocks") / "model", *sizes, *experts)


@pytest.mark.parametrize("scales", ["f32", "power_of_two"])
def test_mismatch_falls_when_the_trainer_rounds_like_the_server(
    launch: Start, inputs: Inputs, whole_blocks: Path, tmp_path: Path, scales: str
) -> None:
    """KL of the same weights on what a server in FP8 sampled, by a trainer in bf16 and in FP8."""

    def mismatch(name: str, *overrides: str) -> float:
        settings = [f"model.hf={whole_blocks}", "model.load=null", f"rollout.fp8={scales}"]
        settings += ["run.steps=1", "optim.warmup_steps=0", "eval.every=1", *ONE_RANK]
        settings += ["eval.max_new_tokens=2", "data.prompts_per_step=16", "algo.minibatches=1"]
        metrics = finished(launch(inputs.rl(tmp_path / name, *settings, *overrides)))
        return float(metrics[1]["mismatch/kl_rollout_train_k3"])

    plain = mismatch("bf16")
    same = mismatch("fp8", f"precision.fp8={{backend: emulated, scales: {scales}}}")
    assert plain > 1e-3, "FP8 on one side only is seen"
    assert same < plain / 2, (same, plain)
