"""What emulated FP8 does to whole runs: the mismatch with a server in FP8, and learning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_tiny_model
from tests.e2e.conftest import Inputs, Launch
from tests.helpers.fp8_blocks import edit_config
from tests.helpers.tools import tool

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(3600)]

Start = Callable[..., Launch]
ONE_RANK = ["parallel={dp: 1, ep: 1}", "precision.dtype=bf16", "monitor.tensorboard=false"]


def finished(started: Launch) -> list[dict[str, Any]]:
    assert started.wait(timeout_s=1800) == 0, started.text()
    return started.metrics()


# --- servers with weights in FP8 ------------------------------------------------------------------


def test_servers_that_are_sent_fp8_sample_what_servers_do_that_round_bf16(
    launch: Start, inputs: Inputs, whole_blocks: Path, tmp_path: Path
) -> None:
    """Codes of the trainer's weights are made there or here: all numbers of a run are the same."""
    folder = tmp_path / "in_fp8"
    tool("quantize_hf_fp8").quantize(whole_blocks, folder, "f32")
    edit_config(folder, dtype="bfloat16")  # what is plain there, as the trainer has it

    def metrics(name: str, *overrides: str) -> list[dict[str, Any]]:
        settings = [f"model.hf={whole_blocks}", "model.load=null", "rollout.fp8=f32"]
        settings += ["run.steps=2", "eval.every=1", "eval.max_new_tokens=2", *ONE_RANK]
        return finished(launch(inputs.rl(tmp_path / name, *settings, *overrides)))

    def numbers(step: dict[str, Any]) -> dict[str, Any]:
        timed = ("perf/", "time", "sync/")
        return {k: v for k, v in step.items() if not k.startswith(timed) and "_seconds" not in k}

    rounded, sent = metrics("bf16"), metrics("fp8", f"rollout.model={folder}")
    assert len(sent) == 3 and list(map(numbers, sent)) == list(map(numbers, rounded))
    assert {step["sync/tensors"] for step in sent} == {77 + 55}  # of which 55 are scales
    assert sent[0]["sync/bytes"] < 0.6 * rounded[0]["sync/bytes"]


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
