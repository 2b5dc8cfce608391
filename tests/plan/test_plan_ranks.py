"""The plan's numbers are those of real models in training: real Megatron, gloo, small sizes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.mesh import Mesh
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from megarl.plan.choices import Choices, Rows
from megarl.plan.memory import StageMemory, optimizer_ranks, padding_bound, plan_memory
from megarl.plan.traffic import pushed_bytes
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

# Measured: within 1 %, and 4 % where experts are not equally popular.
ACTIVATION_RTOL = 0.05
HERE = Choices(fused_norms=torch.cuda.is_available())
MODEL = {
    "model_type": "qwen3",
    "eos_token_id": 1,
    "head_dim": 24,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 24,
}
MOE = {
    "model_type": "qwen3_moe",
    "mlp_only_layers": [0],
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
LAYOUTS = [
    {"tp": 2},
    pytest.param({"pp": 2}, marks=pytest.mark.slow),
    pytest.param({"cp": 2}, marks=pytest.mark.slow),
    {"dp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "etp": 1},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "last_layers": 1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer, three with experts; the vocabulary is padded (24 to 64)."""
    return write_model(tmp_path_factory.mktemp("plan"), {**MODEL, **MOE})


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A Hugging Face folder with random weights."""
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        t.name: 0.1 * torch.randn(t.shape, generator=generator)
        for t in mapping_for(read_spec(folder)).hf_spec()
    }
    for name in tensors:  # a multi-token prediction layer's tables are the model's
        if ".embed_tokens" in name:
            tensors[name] = tensors["model.embed_tokens.weight"].clone()
        if ".shared_head.head" in name:
            tensors[name] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def measure(
    pool: WorkerPool,
    model: Path,
    layout: dict[str, int],
    choices: Choices,
    longest: int = 24,
    **more: Any,
) -> tuple[list[dict[str, Any]], list[StageMemory]]:
    """(what every rank has, what is planned for every stage)"""
    mesh = mesh_of(layout)
    found = pool.run(
        "tests.plan.work_plan:occupied",
        world=mesh.world_size,
        hf=model,
        layout=layout,
        samples=random_samples(8, 4, seed=1, longest=longest),
        dtype=choices.dtype,
        distributed=choices.distributed_optimizer,
        **more,
    )
    planned = plan_memory(
        read_spec(model),
        mesh,
        choices,
        Rows(found[0]["row_tokens"], found[0]["sequence"], found[0]["rows"]),
    )
    return found, planned


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_holds_what_is_planned(
    pool: WorkerPool, model: Path, layout: dict[str, int]
) -> None:
    mesh = mesh_of(layout)
    found, planned = measure(pool, model, layout, HERE)
    for rank in found:
        stage = planned[rank["at"]["pp"]]
        assert (rank["shared"], rank["expert"]) == (stage.count.shared, stage.count.expert)
        assert rank["parameter_bytes"] == stage.parameters
        padding = padding_bound(rank["tensors"], mesh.world_size * rank["buffers"])
        assert 0 <= rank["gradient_bytes"] - stage.gradients <= 4 * padding
    assert_states_split(found, planned, mesh)
    spec = read_spec(model)
    for stage in planned:
        ranks = [r for r in found if r["at"]["pp"] == stage.stage]
        saved = sum(r["saved"] for r in ranks) / len(ranks)
        assert saved == pytest.approx(stage.activations + stage.head, rel=ACTIVATION_RTOL)
        pushed = pushed_bytes(spec, mesh, stage.stage, Choices())
        assert sum(r["sent"] for r in ranks) == pushed


def assert_states_split(
    found: list[dict[str, Any]], planned: list[StageMemory], mesh: Mesh
) -> None:
    """Ranks split a buffer at multiples of its length over their number, wherever parameters begin
    and end: exact is the sum over those that share, and a rank's part but for the padding.
    """
    for stage in planned:
        ranks = [r for r in found if r["at"]["pp"] == stage.stage]
        assert sum(r["optimizer_bytes"] for r in ranks) == stage.optimizer * len(ranks)
        for rank in ranks:
            padding = padding_bound(rank["tensors"], mesh.world_size * rank["buffers"])
            alone = optimizer_ranks(mesh) == (1, 1)
            assert abs(rank["optimizer_bytes"] - stage.optimizer) <= (0 if alone else 12 * padding)


SIGMOID = {  # what both families have
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
}
FAMILIES = {
    "gpt_oss": {
        "intermediate_size": 40,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}
        | {"original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0},
        "sliding_window": 8,
        "swiglu_limit": 7.0,
    },
    "glm4_moe": {
        **SIGMOID,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
    },
    "deepseek_v3": {
        **SIGMOID,
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        # 16 + 8: where values and keys differ in size, attention on a CPU keeps all its scores
        "v_head_dim": 24,
    },
}


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "etp": 1}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "ep": 2, "etp": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_hold_what_is_planned(
    pool: WorkerPool, tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    values = {**MODEL, **FAMILIES[family], "model_type": family}
    folder = write_model(tmp_path, values)
    found, planned = measure(pool, folder, layout, HERE)
    spec, mesh = read_spec(folder), mesh_of(layout)
    assert_states_split(found, planned, mesh)
    for stage in planned:
        ranks = [r for r in found if r["at"]["pp"] == stage.stage]
        for rank in ranks:
            parameters = rank["shared"] + rank["expert"]
            assert parameters == stage.count.parameters
            assert rank["parameter_bytes"] + rank["bias_bytes"] == stage.parameters
        saved = sum(r["saved"] for r in ranks) / len(ranks)
        assert saved == pytest.approx(stage.activations + stage.head, rel=ACTIVATION_RTOL)
        pushed = pushed_bytes(spec, mesh, stage.stage, Choices())
        assert sum(r["sent"] for r in ranks) == pushed


FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize(
    "layout, choices, settings",
    [
        ({}, HERE, None),
        ({}, replace(HERE, dtype="fp32"), None),
        ({"dp": 2}, replace(HERE, distributed_optimizer=False), None),
        ({"pp": 2}, replace(HERE, recompute="full"), FULL),
    ],
    ids=["bf16", "fp32", "whole optimizer", "recompute"],
)
def test_choices_change_what_is_planned(
    pool: WorkerPool,
    model: Path,
    layout: dict[str, int],
    choices: Choices,
    settings: dict[str, Any] | None,
) -> None:
    found, planned = measure(pool, model, layout, choices, recompute=settings)
    for rank in found:
        stage = planned[rank["at"]["pp"]]
        assert rank["parameter_bytes"] == stage.parameters
        assert rank["optimizer_bytes"] == stage.optimizer
        assert rank["saved"] == pytest.approx(stage.activations + stage.head, rel=ACTIVATION_RTOL)


def test_long_sequences_keep_masks_under_context_parallelism(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Of a model that is small for its sequences: without the masks' term the plan is too low."""
    sizes = {"hidden_size": 16, "head_dim": 8, "intermediate_size": 16}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    small = write_model(tmp_path, {**MODEL, **sizes, **heads})
    found, (planned,) = measure(pool, small, {"cp": 2}, HERE, longest=90)
    masks = 4 * 2 * found[0]["row_tokens"] / 2 * found[0]["sequence"]  # bf16, in 4 layers
    for rank in found:
        assert rank["saved"] == pytest.approx(planned.activations + planned.head, rel=0.04)
        assert masks > 2 * 0.04 * rank["saved"]


def test_a_tied_embedding_is_there_twice_and_sent_once(pool: WorkerPool, tmp_path: Path) -> None:
    tied = write_model(tmp_path, {**MODEL, "tie_word_embeddings": True})
    found, planned = measure(pool, tied, {"pp": 2}, HERE)
    for rank, stage in zip(found, planned, strict=True):
        assert rank["shared"] == stage.count.shared
        assert rank["sent"] == pushed_bytes(read_spec(tied), Mesh(pp=2), stage.stage, Choices())
