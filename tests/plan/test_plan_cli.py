"""``megarl plan`` as a user types it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.models.spec import FAMILIES
from tests.conftest import Megarl
from tests.plan.published import PUBLISHED

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "models"
GPUS = {
    "qwen3-8b": 8,
    "qwen3-30b-a3b": 32,
    "qwen3-235b-a22b": 512,
    "deepseek-v3": 1024,
    "glm-4.5": 512,
    "gpt-oss-120b": 64,
    "qwen2.5-7b": 8,
    "llama-3.1-8b": 8,
    "mistral-7b": 8,
    "moonlight-16b-a3b": 16,
    "kimi-k2": 1024,
}


@pytest.fixture
def megarl(megarl: Megarl) -> Megarl:
    """``megarl plan ...``"""
    return lambda *arguments: megarl("plan", *arguments)


def record(megarl: Megarl, *arguments: object) -> dict[str, Any]:
    code, out, err = megarl(*arguments, "--suggestions", 0, "--json", "-")
    found: dict[str, Any] = json.loads(out)
    assert (code, err) == (0 if found["fits"] else 1, "")
    return found


def test_there_is_a_file_for_each_of_these() -> None:
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == set(GPUS)


@pytest.mark.parametrize("model", GPUS)
def test_a_file_of_configs_models_is_enough_and_fits(megarl: Megarl, model: str) -> None:
    """On the GPUs that it says it is for; and it is the model that its publisher counted."""
    file = CONFIGS / f"{model}.yaml"
    spec = PUBLISHED[model].spec
    if spec.family not in FAMILIES:
        pytest.skip(f"no reader of {spec.family} yet")
    assert f"on {GPUS[model]} H100-80GB" in file.read_text()
    found = record(megarl, file, "--gpus", GPUS[model])
    assert found["fits"]
    assert PUBLISHED[model].exact in (None, found["model"]["parameters"])
    assert found["model"]["family"] == spec.family


@pytest.mark.parametrize("model", GPUS)
def test_the_architecture_in_a_file_is_the_published_one(model: str) -> None:
    """``published.py`` was written by hand from the same config.json."""
    from megarl.plan.job import read_job

    spec = PUBLISHED[model].spec
    if spec.family not in FAMILIES:
        pytest.skip(f"no reader of {spec.family} yet")
    job = read_job([str(CONFIGS / f"{model}.yaml")], gpus=8, gpu_gib=80, sample_tokens=None)
    found = [p for p in job.spec.differences(spec) if p.key != "yarn"]
    assert found == []


def test_the_verdict_comes_first(megarl: Megarl) -> None:
    file = CONFIGS / "qwen3-235b-a22b.yaml"
    code, out, err = megarl(file, "--gpus", 512)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "qwen3_moe: 235.09 B parameters, 22.19 B active a token"
    assert any(line.startswith("fits: a rank of stage") for line in lines[:6])
    assert "layouts that fit" in out and max(map(len, lines)) <= 80
    code, out, _ = megarl(file, "--gpus", 512, "--gpu-memory", 40, "--recompute", "none")
    assert code == 1 and "does not fit: a rank of stage" in out


def test_nonsense_exits_with_every_reason(megarl: Megarl) -> None:
    overrides = ["parallel.tp=3", "parallel.ep=64"]
    code, out, err = megarl(CONFIGS / "qwen3-235b-a22b.yaml", *overrides, "--gpus", 7)
    assert (code, out) == (2, "") and "Traceback" not in err
    for words in (
        "6 problems",
        "parallel.tp: found 3; accepted: a divisor of num_attention_heads = 64",
        "parallel.tp: found 3; accepted: a divisor of num_key_value_heads = 4",
        "a product equal to the number of ranks, 7",
        "parallel.ep: found ep",
        "at least 17: 1,314 GiB of weights and gradients",
    ):
        assert words in err


def test_what_if_flags_change_the_plan(megarl: Megarl) -> None:
    arguments = (CONFIGS / "qwen3-30b-a3b.yaml", "--gpus", 32)
    plain = record(megarl, *arguments)["stages"][0]
    offloaded = record(megarl, *arguments, "--offload-optimizer")["stages"][0]
    assert (offloaded["optimizer"], offloaded["host"]) == (0, plain["optimizer"])
    full = record(megarl, *arguments, "--recompute", "full")["stages"][0]
    fp8 = record(megarl, *arguments, "--fp8")["stages"][0]
    assert full["row"] < fp8["row"] < plain["row"]
    assert record(megarl, *arguments, "precision.fp8={}")["stages"][0] == fp8
    recipe = ("precision.fp8={recipe: mxfp8, param_gather: true}", "--fp8")
    stored = record(megarl, *arguments, *recipe)  # the settings' own
    assert stored["choices"]["fp8_stored"] and stored["layout"]["align"] == 32
    assert stored["stages"][0]["parameters"] < fp8["parameters"]
    shorter = record(megarl, *arguments, "--sample-tokens", 4096)
    assert shorter["rows"] == record(megarl, *arguments)["rows"] / 4


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["precision.fp8.backend=emulated"], "precision.fp8.backend: found emulated; accepted: te"),
        (["--fp8", "precision.dtype=fp32"], "precision.dtype: found fp32; accepted: bf16"),
        (["precision.fp8={recipe: mxfp8}", "train.row_tokens=16400"],
         "train.row_tokens: found 16400; accepted: a multiple of"),
        (["precision.fp8.first_layers_bf16=48"], "fewer than num_hidden_layers = 48"),
    ],
)  # fmt: skip
def test_fp8_that_cannot_be_is_refused(megarl: Megarl, overrides: list[str], words: str) -> None:
    code, _, err = megarl(CONFIGS / "qwen3-30b-a3b.yaml", "--gpus", 32, *overrides)
    assert code == 2 and words in err


def test_a_record_goes_to_a_file(megarl: Megarl, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, _ = megarl(CONFIGS / "qwen3-8b.yaml", "--gpus", 8, "--json", file)
    assert (code, out) == (0, "")
    found = json.loads(file.read_text())
    assert len(found["suggestions"]) == 5 and found["stages"][0]["total"] < found["gpu_bytes"]


def test_a_run_with_a_folder_can_be_planned(megarl: Megarl, tmp_path: Path) -> None:
    import yaml

    values = yaml.safe_load((CONFIGS / "qwen3-8b.yaml").read_text())["model"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    base = ["run.dir=/r", "run.steps=3", "optim.lr=1", "algo.policy.name=gspo"]
    arguments = [*base, f"model.hf={tmp_path}", "parallel.tp=4", "--gpus", 8]
    assert record(megarl, *arguments)["model"]["parameters"] == 8_190_735_360
    # another model than the settings were made for
    code, _, err = megarl(CONFIGS / "qwen3-30b-a3b.yaml", *arguments)
    assert code == 2
    for words in ("hidden: found 4096; accepted: 2048, as model.config", "layers: found 36"):
        assert words in err
    code, _, err = megarl(*base, "--gpus", 8)
    assert code == 2 and "model.config: found nothing" in err
