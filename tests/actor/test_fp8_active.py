"""FP8 that was asked for and is not there is an error, whichever way it is missing.

Modules of Transformer Engine are looked at where it is installed (tests/te/test_fp8_settings.py);
here are Megatron's own, which it leaves in bf16 without a word, and modules marked as an emulation
marks those that it has taken over.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import COMMON, MODELS

pytestmark = pytest.mark.dist
WORK = "tests.actor.work_fp8"

ENDS = {"embedding.word_embeddings", "output_layer"}
GQA = {"self_attention.linear_qkv", "self_attention.linear_proj"}
MLA = {f"self_attention.linear_{x}" for x in ("kv_down_proj", "kv_up_proj", "proj")}
DENSE = {"mlp.linear_fc1", "mlp.linear_fc2"}
EXPERTS = {"mlp.router", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"}
SHARED = {"mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"}
KINDS = {
    "qwen3": GQA | DENSE,
    "qwen3_moe yarn": GQA | DENSE | EXPERTS,
    "deepseek_v3": MLA
    | {"self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj"}
    | (DENSE | EXPERTS | SHARED),
    "deepseek_v3 direct queries": MLA | {"self_attention.linear_q_proj"} | DENSE | EXPERTS | SHARED,
    "glm4_moe": GQA | DENSE | EXPERTS | SHARED,
    "gpt_oss": GQA | EXPERTS,
    "qwen3_moe tied": GQA | DENSE | EXPERTS,
}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """config.json of every family: no weights are needed."""
    from transformers import AutoConfig

    folders = {}
    for name in KINDS:
        family, changes = MODELS[name]
        folder = tmp_path_factory.mktemp("described") / name.replace(" ", "_")
        values = copy.deepcopy({**COMMON, **changes})
        AutoConfig.for_model(family, **values).save_pretrained(folder)
        folders[name] = folder
    return folders


def test_every_matrix_of_every_family_is_a_product_of_a_known_kind(
    pool: WorkerPool, described: dict[str, Path]
) -> None:
    (found,) = pool.run(f"{WORK}:kinds", world=1, folders=list(described.values()))
    *families, gated = (set(kinds) for kinds in found)
    tied = {"output_layer"}  # the embedding's matrix, held once
    for (name, wanted), kinds in zip(KINDS.items(), families, strict=True):
        assert kinds | tied == wanted | ENDS, name
    assert gated - families[-1] == SHARED | {"mlp.shared_experts.gate_weight"}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise", "mxfp8"])
def test_fp8_without_transformer_engine_is_no_silent_bf16(
    pool: WorkerPool, described: dict[str, Path], recipe: str
) -> None:
    """Upstream accepts the settings and computes a dense model in bf16."""
    (found,) = pool.run(f"{WORK}:without_engine", world=1, folder=described["qwen3"], recipe=recipe)
    assert (found["fp8"], found["recipe"], found["silent"]) == ("e4m3", recipe, True)
    lines = found["said"].splitlines()
    assert lines[0] == "ConfigError: 4 problems in the configuration:"
    for kind, line in zip(sorted(GQA | DENSE), sorted(lines[1:]), strict=True):
        assert line.startswith(f"  - precision.fp8: found {kind} in bf16 (")
        assert "is no module of Transformer Engine" in line
        assert "Transformer Engine cannot be used here (ModuleNotFoundError" in line
        assert line.split("layers ")[1].startswith("0, 1, 2, 3; accepted: fp8 ")
        assert f"accepted: fp8 {recipe} e4m3" in line


BLOCKS: dict[str, Any] = {"recipe": "blockwise", "scales": "power_of_two"}
TEXT = "fp8 blockwise e4m3, scales power_of_two"
ALL = ("*", None, BLOCKS)
WRONG = [
    ({}, [ALL], []),
    (
        {},
        [ALL, ("self_attention.linear_proj", 2, None)],
        ["self_attention.linear_proj in bf16 (RowParallelLinear does not emulate it), layers 2; "
         f"accepted: {TEXT}"],
    ),
    (
        {},
        [ALL, ("mlp.experts.linear_fc1", None, None)],
        ["mlp.experts.linear_fc1 in bf16 (ColumnParallelLinear does not emulate it), layers 0, 2, "
         f"3; accepted: {TEXT}"],
    ),
    ({}, [ALL, ("mlp.router", 3, BLOCKS)],
     [f"mlp.router in {TEXT}, layers 3; accepted: bf16"]),
    ({}, [ALL, ("output_layer", None, BLOCKS), ("embedding.word_embeddings", None, BLOCKS)],
     [f"embedding.word_embeddings in {TEXT}; accepted: bf16",
      f"output_layer in {TEXT}; accepted: bf16"]),
    (
        {},
        [ALL, ("mlp.linear_fc2", 1, {**BLOCKS, "scales": "f32"})],
        ["mlp.linear_fc2 in fp8 blockwise e4m3, scales f32, layers 1; accepted: " + TEXT],
    ),
    (
        {},
        [ALL, ("mlp.linear_fc1", 1, {**BLOCKS, "format": "hybrid"})],
        [f"mlp.linear_fc1 in {TEXT.replace('e4m3', 'hybrid')}, layers 1; accepted: {TEXT}"],
    ),
    (
        {},
        [ALL, ("self_attention.linear_qkv", 0, {"recipe": "delayed"})],
        [f"self_attention.linear_qkv in fp8 delayed e4m3, layers 0; accepted: {TEXT}"],
    ),
    ({"first_layers_bf16": 1, "last_layers_bf16": 1}, [ALL, ("*", 0, None), ("*", 3, None)], []),
    (
        {"last_layers_bf16": 1},
        [ALL, ("*", 3, None), ("mlp.experts.linear_fc2", 3, BLOCKS)],
        [f"mlp.experts.linear_fc2 in {TEXT}, layers 3; accepted: bf16"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("settings, marks, problems", WRONG)
def test_what_differs_from_the_settings_is_named(
    pool: WorkerPool,
    described: dict[str, Path],
    settings: dict[str, Any],
    marks: list[Any],
    problems: list[str],
) -> None:
    (found,) = pool.run(
        f"{WORK}:marked",
        **{"world": 1, "folder": described["qwen3_moe yarn"], "layout": {}},
        **{"settings": {**BLOCKS, **settings}, "marks": marks},
    )
    assert found["problems"] == [f"precision.fp8: found {text}" for text in problems]
    assert (found["said"] == "") == (not problems)
    assert all(text in found["said"] for text in problems)


def test_what_one_stage_lacks_stops_all_of_them(
    pool: WorkerPool, described: dict[str, Path]
) -> None:
    layout = {"pp": 2}
    given = {"folder": described["qwen3_moe yarn"], "layout": layout, "settings": BLOCKS}
    one_less = [ALL, ("mlp.experts.linear_fc2", 3, None)]
    world = mesh_of(layout).world_size
    found = pool.run(f"{WORK}:marked", world=world, **given, marks=one_less)
    assert found[0]["problems"] == [] and len(found[1]["problems"]) == 1
    assert found[0]["said"].startswith("RunError: looking for FP8 in the built model failed on ran")
    assert found[1]["said"].startswith("ConfigError: 1 problem")
    for rank in (0, 1):
        assert "mlp.experts.linear_fc2 in bf16" in found[rank]["said"]


def test_the_report_has_every_kind_of_all_stages(
    pool: WorkerPool, described: dict[str, Path]
) -> None:
    layout = {"pp": 2, "vpp": 2}
    settings = {**BLOCKS, "first_layers_bf16": 1}
    found = pool.run(
        f"{WORK}:marked",
        **{"world": 2, "folder": described["qwen3_moe yarn"], "layout": layout},
        **{"settings": settings, "marks": [ALL, ("*", 0, None)]},
    )
    assert found[1]["report"] is None
    attention = {"bf16": [0], TEXT: [1, 2, 3]}
    assert found[0]["report"]["megatron"] == {
        **{key: {"bf16": []} for key in ENDS},
        **dict.fromkeys(GQA, attention),
        **{key: {TEXT: [1]} for key in DENSE},
        "mlp.router": {"bf16": [0, 2, 3]},
        **{key: {"bf16": [0], TEXT: [2, 3]} for key in EXPERTS - {"mlp.router"}},
    }
    line = found[0]["lines"]["megatron"]
    assert line.startswith("bf16: ") and f"; {TEXT}: " in line
    assert "self_attention.linear_qkv (layers 1, 2, 3)" in line
    assert "mlp.linear_fc1 (" not in line


def test_rows_and_experts_are_padded_alike(pool: WorkerPool) -> None:
    recipes = ["tensorwise", "delayed", "blockwise", "mxfp8"]
    (found,) = pool.run(f"{WORK}:alignments", world=1, recipes=recipes)
    assert all(ours == theirs for ours, theirs in found)
