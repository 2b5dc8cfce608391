"""config.json of DeepSeek-V3, GLM-4.5 and of models with YaRN: read right, or refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import DataError
from megarl.models.parts import Yarn
from megarl.models.spec import ModelSpec, read_spec
from tests.plan import published

ABSENT = object()
DEEPSEEK_V3: dict[str, Any] = {  # as published, but for the quantisation
    **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1},
    **{"ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168},
    **{"intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840},
    **{"moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256},
    **{"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128},
    **{"num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128},
    **{"num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128},
    **{"qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000},
    **{"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False},
    **{"topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128},
    "vocab_size": 129280,
    "rope_scaling": {
        **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"original_max_position_embeddings": 4096, "type": "yarn"},
    },
}
GLM_45_AIR: dict[str, Any] = {
    **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True},
    **{"attention_dropout": 0.0, "pad_token_id": 151329, "eos_token_id": [151329, 151336, 151338]},
    **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5},
    **{"intermediate_size": 10944, "max_position_embeddings": 131072, "norm_topk_prob": True},
    **{"moe_intermediate_size": 1408, "num_attention_heads": 96, "n_group": 1, "topk_group": 1},
    **{"n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0},
    **{"num_experts_per_tok": 8, "first_k_dense_replace": 1, "num_hidden_layers": 46},
    **{"num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05},
    **{"rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "use_qk_norm": False, "vocab_size": 151552},
}
QWEN3 = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024},
    **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    **{"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "rope_theta": 1000000},
    **{"rms_norm_eps": 1e-06, "tie_word_embeddings": True, "eos_token_id": 151645},
    **{"max_position_embeddings": 40960, "torch_dtype": "bfloat16"},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(folder: Path, values: dict[str, Any], **changes: Any) -> ModelSpec:
    kept = {k: v for k, v in {**values, **changes}.items() if v is not ABSENT}
    (folder / "config.json").write_text(json.dumps(kept))
    return read_spec(folder)


def test_deepseek_v3_is_read(tmp_path: Path) -> None:
    yarn = Yarn(factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    expected = replace(published.DEEPSEEK_V3, yarn=yarn)
    assert read(tmp_path, DEEPSEEK_V3) == expected


def test_deepseek_v3_without_query_latents_and_groups_is_read(tmp_path: Path) -> None:
    """As Moonlight-16B-A3B."""
    changes = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6}
    more = {"rope_scaling": None, "rms_norm_eps": 1e-5, "n_shared_experts": 2}
    spec = read(tmp_path, DEEPSEEK_V3, **changes, **more, num_nextn_predict_layers=0)
    assert spec.mla is not None
    assert (spec.mla.q_rank, spec.mla.norm_eps, spec.norm_eps) == (0, 1e-6, 1e-5)
    assert (spec.router_groups, spec.shared_ffn, spec.yarn, spec.mtp_layers) == (1, 4096, None, 0)


def test_glm_45_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, GLM_45_AIR)
    assert (spec.family, spec.heads, spec.kv_heads, spec.head_dim) == ("glm4_moe", 96, 8, 128)
    assert (spec.qkv_bias, spec.qk_norm, spec.rope_share, spec.rope_theta) == (
        True,
        False,
        0.5,
        1e6,
    )
    assert spec.moe_layers == (False,) + (True,) * 45
    assert (spec.expert_bias, spec.shared_ffn, spec.mtp_layers) == (True, 1408, 1)
    assert (spec.router_score, spec.routed_scale, spec.mla) == ("sigmoid", 1.0, None)
    assert spec.eos_ids == (151329, 151336, 151338)
    large = read(tmp_path, GLM_45_AIR, use_qk_norm=True)  # as GLM-4.5
    assert large.qk_norm


def test_keys_of_transformers_5_mean_the_same(tmp_path: Path) -> None:
    plain = {"rope_theta": ABSENT, "rope_scaling": ABSENT, "partial_rotary_factor": ABSENT}
    new = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}
    assert read(tmp_path, GLM_45_AIR, **plain, rope_parameters=new) == read(tmp_path, GLM_45_AIR)
    without = {k: v for k, v in new.items() if k != "partial_rotary_factor"}
    assert read(tmp_path, GLM_45_AIR, **plain, rope_parameters=without).rope_share == 0.5
    yarn = {**DEEPSEEK_V3["rope_scaling"], "rope_theta": 10000, "rope_type": "yarn"}
    new_deepseek = read(tmp_path, DEEPSEEK_V3, **plain, rope_parameters=yarn, head_dim=64)
    assert new_deepseek == read(tmp_path, DEEPSEEK_V3)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (YARN, Yarn(4.0, 32768)),
        ({**YARN, "beta_fast": 16, "beta_slow": 2.0}, Yarn(4.0, 32768, 16.0, 2.0)),
        ({**YARN, "truncate": False}, Yarn(4.0, 32768, truncate=False)),
        ({**YARN, "mscale": None, "mscale_all_dim": 0}, Yarn(4.0, 32768)),
        # 0.1 ln 4 + 1, which is what transformers takes when it is not given
        ({**YARN, "attention_factor": 1.138629436111989}, Yarn(4.0, 32768)),
        (
            {**YARN, "mscale": 0.5, "mscale_all_dim": 0.25},
            Yarn(4.0, 32768, mscale=0.5, mscale_all_dim=0.25),
        ),
    ],
)
def test_yarn_is_read(tmp_path: Path, block: dict[str, Any], expected: Yarn) -> None:
    assert read(tmp_path, QWEN3, rope_scaling=block).yarn == expected


def test_a_spec_with_parts_survives_json(tmp_path: Path) -> None:
    spec = read(tmp_path, DEEPSEEK_V3)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec


@pytest.mark.parametrize(
    ("values", "key", "value", "says"),
    [
        (QWEN3, "rope_scaling", {"rope_type": "llama3", "factor": 8.0}, ["'llama3'", "yarn"]),
        (QWEN3, "rope_scaling", {"type": "dynamic", "factor": 2.0}, ["rope_scaling.type"]),
        (QWEN3, "rope_scaling", {**YARN, "factor": 0}, ["rope_scaling.factor", "positive"]),
        (QWEN3, "rope_scaling", {**YARN, "mscale": 1.0}, ["mscale_all_dim", "both or none"]),
        (QWEN3, "rope_scaling", {**YARN, "attention_factor": 1.0}, ["attention_factor", "1.13863"]),
        (QWEN3, "rope_scaling", {**YARN, "low_freq_factor": 1}, ["low_freq_factor"]),
        (QWEN3, "partial_rotary_factor", 0.5, ["partial_rotary_factor", "0.5"]),
        (QWEN3, "num_nextn_predict_layers", 1, ["num_nextn_predict_layers", "1"]),
        (DEEPSEEK_V3, "rope_interleave", False, ["rope_interleave", "False"]),
        (DEEPSEEK_V3, "attention_bias", True, ["attention_bias", "True"]),
        (DEEPSEEK_V3, "num_key_value_heads", 64, ["num_key_value_heads", "128"]),
        (DEEPSEEK_V3, "head_dim", 128, ["head_dim", "qk_rope_head_dim=64"]),
        (DEEPSEEK_V3, "qk_rope_head_dim", 63, ["head_dim", "63", "even"]),
        (DEEPSEEK_V3, "kv_lora_rank", None, ["kv_lora_rank", "integer"]),
        (DEEPSEEK_V3, "scoring_func", "softmax", ["scoring_func", "sigmoid"]),
        (DEEPSEEK_V3, "topk_method", "greedy", ["topk_method", "noaux_tc"]),
        (DEEPSEEK_V3, "topk_group", 2, ["topk_group", "num_experts_per_tok=8"]),
        (DEEPSEEK_V3, "topk_group", 9, ["topk_group", "at most n_group=8"]),
        (DEEPSEEK_V3, "n_group", 7, ["n_group", "divisor", "256"]),
        (DEEPSEEK_V3, "num_experts_per_tok", 257, ["num_experts_per_tok", "256"]),
        (DEEPSEEK_V3, "num_experts_per_tok", 1, ["num_experts_per_tok", "at least 2"]),
        (DEEPSEEK_V3, "first_k_dense_replace", 61, ["first_k_dense_replace", "61"]),
        (DEEPSEEK_V3, "moe_layer_freq", 2, ["moe_layer_freq", "2"]),
        (DEEPSEEK_V3, "n_shared_experts", None, ["n_shared_experts", "integer"]),
        (DEEPSEEK_V3, "quantization_config", {"quant_method": "fp8"}, ["quantization_config"]),
        (GLM_45_AIR, "architectures", ["Glm4MoeForX"], ["Glm4MoeForCausalLM"]),
        (GLM_45_AIR, "partial_rotary_factor", 1.5, ["partial_rotary_factor", "at most 1"]),
        (GLM_45_AIR, "partial_rotary_factor", 0.2, ["head_dim", "even"]),
        (GLM_45_AIR, "use_qk_norm", "yes", ["use_qk_norm", "true or false"]),
        (GLM_45_AIR, "routed_scaling_factor", 0, ["routed_scaling_factor", "positive"]),
    ],
)
def test_a_value_that_is_not_supported_is_refused(
    tmp_path: Path, values: dict[str, Any], key: str, value: Any, says: list[str]
) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, values, **{key: value})
    for part in says:
        assert part in str(error.value)


GPT_OSS_20B: dict[str, Any] = {  # as published, but for the quantisation
    **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True},
    **{"attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64},
    **{"hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096},
    **{"initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072},
    **{"num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24},
    **{"num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False},
    **{"pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000},
    **{"router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
    **{"tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088},
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn"},
        **{"original_max_position_embeddings": 4096, "truncate": False},
    },
}


def test_gpt_oss_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path, GPT_OSS_20B)
    smaller = {"layers": 24, "experts": 32, "moe_layers": (True,) * 24, "windows": (128, 0) * 12}
    yarn = Yarn(factor=32.0, original_positions=4096, truncate=False)
    assert spec == replace(published.GPT_OSS_120B, yarn=yarn, **smaller)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec


def test_gpt_oss_takes_transformers_values_for_absent_keys(tmp_path: Path) -> None:
    absent = ("head_dim", "layer_types", "swiglu_limit", "rope_theta", "attention_bias")
    absent += ("tie_word_embeddings", "experts_per_token")
    spec = read(tmp_path, GPT_OSS_20B, **dict.fromkeys(absent, ABSENT), swiglu_alpha=1.702)
    assert spec == read(tmp_path, GPT_OSS_20B)
    full = read(tmp_path, GPT_OSS_20B, layer_types=["full_attention"] * 24, sliding_window=None)
    assert full.windows == ()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}},
            ["quantization_config.quant_method: found 'mxfp4'", "bfloat16", "dequantize=True"],
        ),
        ({"attention_bias": False}, ["attention_bias", "False", "true"]),
        ({"swiglu_alpha": 1.0}, ["swiglu_alpha", "1.0", "1.702"]),
        ({"swiglu_limit": 0}, ["swiglu_limit", "0", "positive"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"layer_types": ["full_attention"] * 23}, ["layer_types", "num_hidden_layers=24"]),
        ({"layer_types": ["chunked_attention"] * 24}, ["layer_types", "sliding_attention"]),
        ({"sliding_window": None}, ["sliding_window", "None", "integer"]),
        ({"sliding_window": -1}, ["sliding_window", "-1", "at least 1"]),
        ({"experts_per_token": 2}, ["num_experts_per_tok and experts_per_token", "[4, 2]"]),
        ({"num_experts_per_tok": 33, "experts_per_token": 33}, ["33", "num_local_experts=32"]),
        ({"architectures": ["GptOssForSequenceClassification"]}, ["GptOssForCausalLM"]),
        ({"rope_scaling": None}, ["rope_parameters", "None", "YaRN"]),
        ({"scoring_func": "sigmoid"}, ["scoring_func", "softmax"]),
    ],
)
def test_a_gpt_oss_that_is_not_supported_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, GPT_OSS_20B, **changes)
    for part in says:
        assert part in str(error.value)
