"""The form of servers' weights, and every contradiction of settings and config.json about it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.served import served_dtype, served_scales
from megarl.config.unused import unused_settings
from tests.config.cases import MOE, Case, assert_exactly, base, found_problems

MODEL = "rollout.model=HERE/served"
URLS = ["rollout.urls=[http://a:1]", "rollout.key_file=HERE/key"]
SGLANG = ["rollout.engine=sglang", "rollout.server_command=[sh]"]
TE = "precision.fp8={{backend: emulated, scales: {}}}"


def fp8(**changes: Any) -> dict[str, Any]:
    """Of config.json; None: the key is not there."""
    value = {"quant_method": "fp8", "weight_block_size": [128, 128], **changes}
    return {"quantization_config": {k: v for k, v in value.items() if v is not None}}


F32, POWERS = fp8(scale_fmt="float"), fp8(scale_fmt="ue8m0")
VALID = [
    *(Case([f"run.timeout_s={run}", f"sync.timeout_s={sync}"], {})
      for run, sync in ((7200, 3600), (600, 300), (600, 1))),
    *(Case([*servers, "sync.delta=true"], {}) for servers in ([], SGLANG)),
    *(Case([MODEL, *servers], {}, served=served) for served in ({}, fp8(), F32, POWERS)
      for servers in ([], URLS, SGLANG, ["rollout.discover=true"])),
    *(Case([MODEL], {}, served={key: dtype}) for key in ("dtype", "torch_dtype")
      for dtype in ("float32", "bfloat16")),
    *(Case([], {}, hf=hf) for hf in (fp8(), F32, POWERS)),
    Case([MODEL], {}, hf=fp8(weight_block_size=[64, 64]), served={"quantization_config": None}),
    *(Case([f"sync.fp8={kind}"], {}, hf=fp8()) for kind in ("auto", "f32", "power_of_two")),
    Case([MODEL, "sync.fp8=power_of_two"], {}, served=fp8()),
    Case([MODEL, "sync.fp8=power_of_two"], {}, served=POWERS),
    Case([MODEL, "sync.fp8=f32"], {}, served=F32),
    Case([MODEL, "sync.fp8=auto"], {}, served={}),
    Case([MODEL, "rollout.fp8=f32"], {}, served=fp8()),
    Case([MODEL, "rollout.fp8=power_of_two"], {}, served=POWERS),
    Case([MODEL, "rollout.fp8=power_of_two", "sync.fp8=power_of_two"], {}, served=fp8()),
    Case([MODEL, "rollout.fp8=power_of_two"], {}, served={}),  # rounds the plain ones it is sent
    Case([MODEL, TE.format("f32")], {}, served=fp8()),
    Case([MODEL, TE.format("power_of_two")], {}, served=POWERS),
    Case([MODEL, "precision.fp8={backend: emulated, recipe: tensorwise}"], {}, served=POWERS),
    Case([MODEL], {}),  # config.json is not at hand
]  # fmt: skip
WRONG = [
    *(Case([f"run.timeout_s={run}", f"sync.timeout_s={sync}"],
           {"run.timeout_s": [str(run), f">= {2 * sync}", "sync.timeout_s"]})
      for run, sync in ((60, 3600), (600, 301), (1, 120))),
    Case([MODEL], {"rollout.model": ["served, whose dtype is float16", "float32 or bfloat16"]},
         served={"torch_dtype": "float16"}),
    Case([MODEL], {"rollout.model": ["served, whose model_type is llama", "model.hf, qwen3_moe"]},
         served={"model_type": "llama"}),
    *(
        Case(given, {key: [where, f"whose weights are quantised {found}", "[128, 128]"]},
             **{of: {"quantization_config": value}})
        for given, key, where, of in (([MODEL], "rollout.model", "served", "served"),
                                      ([], "model.hf", "model", "hf"))
        for value, found in (
            ({"quant_method": "gptq"}, "by 'gptq'"), ({"quant_method": None}, "by None"),
            ("fp8", "by 'fp8'"), (fp8(weight_block_size=[64, 128])["quantization_config"],
                                  "in blocks of [64, 128]"),
            (fp8(weight_block_size=None)["quantization_config"], "in blocks of None"),
        )
    ),
    *(
        Case([*given, "sync.fp8=f32"], {"sync.fp8": [f"{where}, which is plain", "leave it out"]},
             served=served)
        for given, where, served in (([MODEL], "served", {}), ([], "model", None))
    ),
    Case([MODEL, "sync.fp8=f32"], {"sync.fp8": ["f32 |", "auto, power_of_two: ", "served's conf"]},
         served=POWERS),
    Case([MODEL, "sync.fp8=power_of_two"], {"sync.fp8": ["power_of_two |", "auto, f32: "]},
         served=F32),
    Case(["sync.fp8=f32"], {"sync.fp8": ["auto, power_of_two: ", "model's config.json"]},
         hf=POWERS),
    Case([MODEL, "rollout.fp8=f32"], {"rollout.fp8": ["f32 |", "none, power_of_two: "]},
         served=POWERS),
    Case([MODEL, "rollout.fp8=power_of_two"],
         {"rollout.fp8": ["power_of_two |", "none, f32: sync.fp8=auto means so"]}, served=fp8()),
    Case([MODEL, "rollout.fp8=f32", "sync.fp8=power_of_two"],
         {"rollout.fp8": ["none, power_of_two: sync.fp8=power_of_two means so"]}, served=fp8()),
    Case([MODEL, TE.format("f32")], {"precision.fp8.scales": ["f32 |", "power_of_two: "]},
         served=POWERS),
    Case([MODEL, TE.format("power_of_two")], {"precision.fp8.scales": ["f32: sync.fp8=auto"]},
         served=fp8()),
    *(
        Case([f"rollout.model=HERE/{path}"], {"rollout.model": [path, said]})
        for path, said in (
            ("nothing", "does not exist"), ("key", "which is no folder"),
            ("rollouts", "without *.safetensors"),
        )
    ),
]  # fmt: skip


@pytest.fixture
def there(place: Path) -> Path:
    (place / "served").mkdir()
    (place / "served" / "config.json").write_text(json.dumps(MOE))
    (place / "served" / "model.safetensors").write_text("x")
    (place / "rollouts" / "config.json").write_text("{}")
    return place


@pytest.mark.parametrize("case", [*VALID, *WRONG], ids=str)
def test_a_contradiction_alone_gives_exactly_its_problem(case: Case, there: Path) -> None:
    assert_exactly(case, there)


def test_servers_elsewhere_need_no_weights_here_and_the_trainers_folder_none_for_them(
    there: Path,
) -> None:
    (there / "served" / "model.safetensors").unlink()
    assert_exactly(Case([MODEL, *URLS], {}, served={}), there)
    (there / "served" / "model.safetensors").write_text("x")
    (there / "model" / "model.safetensors").unlink()
    load = "model.load=HERE/checkpoint"
    assert_exactly(Case([MODEL, load], {}, served={}), there)
    assert [key for key, _ in found_problems(Case([load], {}), there)] == ["model.hf"]


def test_a_config_json_that_does_not_parse_is_told(there: Path) -> None:
    (there / "served" / "config.json").write_text("[1]")
    assert_exactly(Case([MODEL], {"rollout.model": ["config.json that is an object"]}), there)


@pytest.mark.parametrize("mode", ["sft", "train_only"])
@pytest.mark.parametrize("setting", ["rollout.model=/x", "sync.fp8=f32"])
def test_without_servers_their_form_has_no_effect(mode: str, setting: str) -> None:
    config = load_config([], [*base(Path("/p"), mode), setting])
    assert [p.key for p in unused_settings(config, 8)] == [setting.partition("=")[0]]


@pytest.mark.parametrize(
    ("given", "hf", "scales"),
    [
        ([], {}, None),
        ([], fp8(), "f32"),
        (["sync.fp8=power_of_two"], fp8(), "power_of_two"),
        ([], POWERS, "power_of_two"),
        ([], F32, "f32"),
    ],
)
def test_the_kind_of_scales(given: list[str], hf: dict[str, Any], scales: str | None) -> None:
    assert served_scales(load_config([], [*base(Path("/p"), "rl"), *given]), hf) == scales


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_dtype_is_the_folders_and_without_one_the_trainers(
    precision: str, tmp_path: Path
) -> None:
    given = [*base(tmp_path, "rl"), f"precision.dtype={precision}"]
    assert served_dtype(load_config([], given)) == precision
    served = load_config([], [*given, f"rollout.model={tmp_path}"])
    for values, dtype in (
        ({}, "fp32"), ({"dtype": "bfloat16"}, "bf16"), ({"torch_dtype": "float32"}, "fp32"),
        ({"torch_dtype": "bfloat16"}, "bf16"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert served_dtype(served) == dtype


def test_servers_are_started_from_their_own_folder(tmp_path: Path) -> None:
    given = base(tmp_path, "rl")
    assert load_config([], given).server_hf == tmp_path / "model"
    assert load_config([], [*given, "rollout.model=/other"]).server_hf == Path("/other")
