"""Every setting of FP8 arrives in models that the real Transformer Engine has constructed, and what
does not is found: the checks of ``actor/fp8_active.py`` on its modules.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.fp8 import Fp8Section, te_environment
from tests.actor.compare import mesh_of
from tests.actor.option_rows import ROWS
from tests.helpers.dist import WorkerPool
from tests.helpers.families import COMMON, MODELS, save_model

pytestmark = pytest.mark.dist
WORK = "tests.te.work_fp8_settings"

# Sides in multiples of 128 on one rank, of 64 on two, as blocks and mxfp8 want them
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4}
EXPERTS = {"moe_intermediate_size": 128}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
          "v_head_dim": 64}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {**WIDE, "head_dim": 64},
    "qwen3_moe tied": {**WIDE, **EXPERTS, "head_dim": 64},
    "deepseek_v3": {**WIDE, **EXPERTS, **LATENT},
    "glm4_moe": {**WIDE, **EXPERTS, "head_dim": 64},
    "gpt_oss": {**WIDE, "head_dim": 64},
}
GQA = ("self_attention.linear_qkv", "self_attention.linear_proj")
MLA = tuple(f"self_attention.linear_{x}" for x in (
    "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj"))  # fmt: skip
DENSE = ("mlp.linear_fc1", "mlp.linear_fc2")
ROUTED = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
SHARED = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
# kind -> layers, of what is quantised; the first without experts, if any: DENSE_LAYER
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int | None]] = {
    "qwen3": ((*GQA, *DENSE), (), None),
    "qwen3_moe tied": (GQA, ROUTED, 1),
    "deepseek_v3": (MLA, (*ROUTED, *SHARED), 0),
    "glm4_moe": (GQA, (*ROUTED, *SHARED), 0),
    "gpt_oss": (GQA, ROUTED, None),
}
RECIPES = {
    "tensorwise": ({"recipe": "tensorwise", "format": "hybrid"}, "fp8 tensorwise hybrid"),
    "delayed": (
        {"recipe": "delayed", "amax_history": 7, "amax_algo": "most_recent", "margin": 2},
        "fp8 delayed e4m3, amax_history 7, amax_algo most_recent, margin 2",
    ),
    "blockwise": (
        {"recipe": "blockwise", "scales": "power_of_two"},
        "fp8 blockwise e4m3, scales power_of_two",
    ),
}


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """config.json of these, without weights."""
    from transformers import AutoConfig

    folders = {}
    for name, changes in CHANGES.items():
        family, own = MODELS[name]
        values = copy.deepcopy({**COMMON, **own, **changes})
        folders[name] = tmp_path_factory.mktemp("wide") / name.replace(" ", "_")
        AutoConfig.for_model(family, **values).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def f32_pool() -> Iterator[WorkerPool]:
    """Workers in whose environment a run has put what ``scales: f32`` wants."""
    wanted = te_environment(Fp8Section(scales="f32"))
    given = {name: value for name, value in wanted.items() if value is not None}
    workers = WorkerPool(first="tests.te.shim", **given)
    yield workers
    workers.close()


def expected(name: str, text: str, bf16: tuple[int, ...] = ()) -> dict[str, dict[str, list[int]]]:
    """The report of a model of four layers, of which those of ``bf16`` are left out."""
    everywhere, of_experts, dense = KINDS[name]
    places = {kind: list(range(4)) for kind in everywhere}
    if of_experts:
        places |= {kind: [n for n in range(4) if n != dense] for kind in of_experts}
    if dense is not None:
        places |= {kind: [dense] for kind in DENSE}
    report = {}
    for kind, layers in places.items():
        parts = {
            "bf16": [n for n in layers if n in bf16],
            text: [n for n in layers if n not in bf16],
        }
        report[kind] = {precision: where for precision, where in parts.items() if where}
    report["embedding.word_embeddings"] = {"bf16": []}
    if "tied" not in name:
        report["output_layer"] = {"bf16": []}
    if of_experts:
        report["mlp.router"] = {"bf16": places[of_experts[0]]}
    return report


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_said_of_every_family_which_products_quantise_and_how(
    te_pool: WorkerPool, wide: dict[str, Path], recipe: str
) -> None:
    settings, text = RECIPES[recipe]
    cases = [(folder, {}, settings, {}) for folder in wide.values()]
    (found,) = te_pool.run(f"{WORK}:reports", world=1, cases=cases)
    for name, report in zip(wide, found, strict=True):
        assert report == expected(name, text), name


LAYOUTS = [{"tp": 2}, {"pp": 2}, {"dp": 2, "ep": 2}, {"pp": 2, "vpp": 2}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_report_of_a_layout_is_that_of_one_process(
    te_pool: WorkerPool, wide: dict[str, Path], layout: dict[str, int]
) -> None:
    settings = {**RECIPES["blockwise"][0], "first_layers_bf16": 1, "last_layers_bf16": 1}
    cases = [(wide["deepseek_v3"], layout, settings, {})]
    first, *others = te_pool.run(f"{WORK}:reports", world=mesh_of(layout).world_size, cases=cases)
    assert first == [expected("deepseek_v3", RECIPES["blockwise"][1], bf16=(0, 3))]
    assert all(other == [None] for other in others)


def test_f32_scales_arrive_where_the_environment_was_set_before(
    te_pool: WorkerPool, f32_pool: WorkerPool, wide: dict[str, Path]
) -> None:
    """And are missed where it was not: Transformer Engine's own choice is powers of two."""
    cases = [
        (wide["qwen3"], {}, {"recipe": "blockwise", "scales": scales}, {})
        for scales in ("f32", "power_of_two")
    ]
    (right, wrong), (wrong_too, right_too) = (
        pool.run(f"{WORK}:reports", world=1, cases=cases)[0] for pool in (f32_pool, te_pool)
    )
    assert right == expected("qwen3", "fp8 blockwise e4m3, scales f32")
    assert right_too == expected("qwen3", "fp8 blockwise e4m3, scales power_of_two")
    for said, found, asked in (
        (wrong, "f32", "power_of_two"),
        (wrong_too, "power_of_two", "f32"),
    ):
        for kind in (*GQA, *DENSE):
            line = f"precision.fp8: found {kind} in fp8 blockwise e4m3, scales {found}, layers 0, 1"
            assert line in said
        assert said.count(f"accepted: fp8 blockwise e4m3, scales {asked}") == 4


def test_a_gpu_without_the_recipe_is_named_by_transformer_engines_own_check(
    te_pool: WorkerPool, wide: dict[str, Path]
) -> None:
    mxfp8 = {"recipe": "mxfp8"}
    qwen3 = wide["qwen3"]
    cases = [
        (qwen3, {}, mxfp8, {"capability": (9, 0)}),
        (qwen3, {}, {"recipe": "blockwise", "scales": "power_of_two"}, {"capability": (8, 9)}),
        (qwen3, {}, {"recipe": "tensorwise"}, {"capability": (8, 0)}),
        (qwen3, {}, mxfp8, {"capability": (10, 0)}),
        (qwen3, {}, {"recipe": "tensorwise"}, {"capability": (8, 9)}),
    ]
    (found,) = te_pool.run(f"{WORK}:reports", world=1, cases=cases)
    for said, words in zip(
        found,
        ("capability 10.0 or higher required for MXFP8", "9.0 or higher and CUDA >= 12.9",
         "capability 8.9 or higher required for FP8"),
        strict=False,
    ):  # fmt: skip
        assert "self_attention.linear_qkv in bf16 (Transformer Engine: " in said and words in said
    assert found[3] == expected("qwen3", "fp8 mxfp8 e4m3")
    assert found[4] == expected("qwen3", "fp8 tensorwise e4m3")


def test_what_megatron_takes_and_does_not_do_is_found(
    te_pool: WorkerPool, wide: dict[str, Path]
) -> None:
    """Options of Megatron that differ from the settings, as a fault of ours or of an upgrade would
    make them.
    """
    settings, text = RECIPES["blockwise"]
    altered: list[tuple[dict[str, Any], str]] = [
        ({"fp8": None}, "in bf16 (Megatron has no FP8 context for it), layers 0, 1, 2, 3"),
        ({"fp8": "hybrid"}, "in fp8 blockwise hybrid, scales power_of_two, layers 0, 1, 2, 3"),
        ({"fp8_recipe": "tensorwise"}, "in fp8 tensorwise e4m3, layers 0, 1, 2, 3"),
        ({"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1,
          "num_layers_at_end_in_bf16": 1},
         "in bf16 (Megatron has no FP8 context for it), layers 0, 3"),
        ({"own": "linear_proj"}, "in bf16 (TERowParallelLinear has a recipe of its own, which no "
         "setting here gives it), layers 0, 1, 2, 3"),
    ]  # fmt: skip
    cases = [(wide["qwen3"], {}, settings, also) for also, _ in altered]
    (found,) = te_pool.run(f"{WORK}:reports", world=1, cases=cases)
    for said, (also, words) in zip(found, altered, strict=True):
        line = f"found self_attention.linear_proj {words}; accepted: {text}"
        assert line in said, also
        assert ("linear_qkv" in said) == ("own" not in also)


def test_local_layers_beside_transformer_engine_are_no_silent_bf16(
    te_pool: WorkerPool, wide: dict[str, Path]
) -> None:
    settings, text = RECIPES["tensorwise"]
    (found,) = te_pool.run(f"{WORK}:local_layers", world=1, hf=wide["glm4_moe"], settings=settings)
    kinds = {*GQA, *DENSE, *ROUTED, *SHARED}
    assert len(found) == len(kinds)
    for kind in kinds:
        (line,) = (x for x in found if f"found {kind} in bf16" in x)
        assert (
            "ParallelLinear is no module of Transformer Engine)" in line or "ExpertOutput" in line
        )
        assert line.endswith(f"accepted: {text}")


def test_sides_that_do_not_divide_are_named(te_pool: WorkerPool, tmp_path: Path) -> None:
    from transformers import AutoConfig

    family, own = MODELS["qwen3_moe tied"]
    narrow = {**CHANGES["qwen3_moe tied"], "moe_intermediate_size": 48}
    AutoConfig.for_model(family, **{**COMMON, **own, **narrow}).save_pretrained(tmp_path)
    cases: list[Any] = [
        (tmp_path, {}, {"recipe": "mxfp8"}, {"capability": (10, 0)}),
        (tmp_path, {}, {"recipe": "tensorwise"}, {}),
    ]
    (found,) = te_pool.run(f"{WORK}:reports", world=1, cases=cases)
    assert "mlp.experts.linear_fc2 of 256 x 48 on a rank; accepted: multiples of 32" in found[0]
    assert "linear_qkv" not in found[0] and "linear_fc1 of 96" not in found[0]
    assert isinstance(found[1], dict)  # 48 is a multiple of 16


def test_parameters_are_gathered_in_fp8(te_pool: WorkerPool, wide: dict[str, Path]) -> None:
    settings, text = RECIPES["blockwise"]
    given = {**settings, "first_layers_bf16": 1}
    (found,) = te_pool.run(
        f"{WORK}:stored", world=1, hf=wide["qwen3_moe tied"], layout={}, settings=given
    )
    assert found["report"] == expected("qwen3_moe tied", text, bf16=(0,))
    for name, kind in found["stored"].items():
        inside = name.startswith("decoder.layers.") and not name.startswith("decoder.layers.0.")
        matrix = name.rstrip("0123456789").endswith(".weight") and "linear_" in name
        quantised = inside and matrix
        assert (kind == "Float8BlockwiseQTensor") == quantised, (name, kind)
    assert found["ddp"] and found["buffers"] == ["torch.bfloat16", "torch.uint8"]


def test_parameters_that_are_not_stored_as_asked_for_are_named(
    te_pool: WorkerPool, wide: dict[str, Path]
) -> None:
    settings = {**RECIPES["blockwise"][0], "param_gather": True}
    cases = [(wide["qwen3"], {}, settings, {"fp8_param": False})]
    (found,) = te_pool.run(f"{WORK}:reports", world=1, cases=cases)
    for kind in (*GQA, *DENSE):
        line = f"precision.fp8.param_gather: found {kind} is stored in bf16; accepted: false"
        assert line in found[0]


def test_megatrons_objects_hold_what_was_set(te_pool: WorkerPool, tiny_model: Path) -> None:
    """Of a model with experts, which Megatron refuses where Transformer Engine is absent."""
    from dataclasses import replace

    rows = [replace(row, dense=False) for row in ROWS if row.key.startswith("precision.fp8.")]
    assert len(rows) >= 10
    (found,) = te_pool.run(f"{WORK}:options", world=1, hf=tiny_model, rows=rows)
    for row, values in zip(rows, found, strict=True):
        assert values["set"] == row.expect, row.key


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_experts_pad_their_own_tokens(
    te_pool: WorkerPool, wide: dict[str, Path], recipe: str
) -> None:
    (found,) = te_pool.run(
        f"{WORK}:experts", world=1, hf=wide["deepseek_v3"], settings={"recipe": recipe}
    )
    assert found == {"by": {"Fp8Padding"}, "router": False}


def test_an_actor_is_built_so(te_pool: WorkerPool, tmp_path: Path) -> None:
    hf = save_model("qwen3_moe tied", tmp_path / "m", torch.bfloat16, **CHANGES["qwen3_moe tied"])
    settings, text = RECIPES["tensorwise"]
    (found,) = te_pool.run(f"{WORK}:of_an_actor", world=1, hf=hf, settings=settings)
    assert found["report"] == expected("qwen3_moe tied", text)
    assert found["model"] == ("hybrid", "tensorwise", False)
    assert found["optimizer"] == "tensorwise"
