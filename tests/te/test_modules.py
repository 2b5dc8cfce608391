"""What layers are made of, and where Transformer Engine is seen at all."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

TORCH = ["torch.optim.adamw.AdamW"]
FUSED = ["transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"]
LAST = "decoder.layers.3."
OF_TE = {  # of the last layer
    "qwen3": {
        "input_layernorm": "IdentityOp",
        "self_attention.linear_qkv": "TELayerNormColumnParallelLinear",
        "self_attention.q_layernorm": "RMSNorm",
        "self_attention.core_attention": "TEDotProductAttention",
        "self_attention.linear_proj": "TERowParallelLinear",
        "pre_mlp_layernorm": "IdentityOp",
        "mlp.linear_fc1": "TELayerNormColumnParallelLinear",
        "mlp.linear_fc2": "TERowParallelLinear",
    },
    "deepseek_v3": {
        "input_layernorm": "RMSNorm",
        "self_attention": "LatentAttention",
        "self_attention.linear_q_down_proj": "TELinear",
        "self_attention.q_layernorm": "IdentityOp",
        "self_attention.linear_q_up_proj": "TELayerNormColumnParallelLinear",
        "self_attention.linear_kv_down_proj": "TELinear",
        "self_attention.linear_kv_up_proj": "TELayerNormColumnParallelLinear",
        "self_attention.core_attention": "TEDotProductAttention",
        "pre_mlp_layernorm": "RMSNorm",
        "mlp.router": "Router",
        "mlp.experts": "TEGroupedMLP",
        "mlp.experts.linear_fc1": "TEColumnParallelGroupedLinear",
        "mlp.experts.linear_fc2": "TERowParallelGroupedLinear",
        "mlp.shared_experts.linear_fc1": "TEColumnParallelLinear",
        "mlp.shared_experts.linear_fc2": "TERowParallelLinear",
    },
    "gpt_oss": {
        "self_attention.linear_qkv": "TELayerNormColumnParallelLinear",
        "self_attention.core_attention": "PackedAttention",  # it has sinks
        "mlp.experts": "TEGroupedMLP",
    },
}
OUTSIDE = {
    "embedding.word_embeddings": "VocabParallelEmbedding",
    "decoder.final_layernorm": "RMSNorm",
    "output_layer": "ColumnParallelLinear",
}


def modules(pool: WorkerPool, function: str, hf: Path, **sections: Any) -> dict[str, Any]:
    (found,) = pool.run(f"tests.te.{function}", world=1, hf=hf, layout={}, **sections)
    return found


@pytest.mark.parametrize("name", OF_TE)
def test_layers_are_made_of_its_modules(
    te_pool: WorkerPool, families: dict[str, Path], name: str
) -> None:
    grouped = {"grouped_gemm": True}
    found = modules(te_pool, "actions:modules", families[name], moe=grouped)
    wanted = OUTSIDE | {f"{LAST}{part}": kind for part, kind in OF_TE[name].items()}
    assert {part: found["modules"].get(part) for part in wanted} == wanted
    assert found["optimizers"] == FUSED


def test_experts_may_be_computed_one_by_one(te_pool: WorkerPool, families: dict[str, Path]) -> None:
    found = modules(te_pool, "actions:modules", families["deepseek_v3"])["modules"]
    assert found[f"{LAST}mlp.experts"] == "SequentialMLP"
    assert found[f"{LAST}mlp.experts.local_experts.7.linear_fc1"] == "TEColumnParallelLinear"
    assert found[f"{LAST}mlp.experts.local_experts.7.linear_fc2"] == "TERowParallelLinear"


def test_attention_in_fp32_stays_ours(te_pool: WorkerPool, families: dict[str, Path]) -> None:
    """Its fast kernels are for 16 bits."""
    fp32 = {"dtype": "fp32"}
    found = modules(te_pool, "actions:modules", families["qwen3"], precision=fp32)["modules"]
    assert found[f"{LAST}self_attention.core_attention"] == "PackedAttention"
    assert found[f"{LAST}self_attention.linear_proj"] == "TERowParallelLinear"


def test_layers_behind_the_last_are_megatrons_own(
    te_pool: WorkerPool, families: dict[str, Path]
) -> None:
    found = modules(te_pool, "actions:modules", families["glm4_moe"])["modules"]
    behind = {kind for name, kind in found.items() if name.startswith("mtp.")}
    assert behind and not {kind for kind in behind if kind.startswith("TE")}


def test_without_a_gpu_a_run_does_not_see_it(
    local_pool: WorkerPool, families: dict[str, Path]
) -> None:
    """It is installed here, and an ordinary worker builds what it builds without."""
    found = modules(local_pool, "actions:modules", families["qwen3"])
    layer = {name: kind for name, kind in found["modules"].items() if name.startswith(LAST)}
    assert layer[f"{LAST}self_attention.linear_qkv"] == "ColumnParallelLinear"
    assert not {kind for kind in layer.values() if kind.startswith("TE")}
    assert found["optimizers"] == TORCH
