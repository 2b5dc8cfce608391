"""config.json of Qwen2, Llama and Mistral, and of Kimi-K2: read right, or refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import DataError
from megarl.models.parts import Llama3, Yarn
from megarl.models.spec import ModelSpec
from tests.models.test_spec_families import ABSENT, DEEPSEEK_V3, read
from tests.plan import published

QWEN25_7B: dict[str, Any] = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0},
    **{"bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584},
    **{"intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28},
    **{"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4},
    **{"rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False},
    "vocab_size": 152064,
}
SCALING = {
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
}
LLAMA_31_8B: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False},
    **{"attention_dropout": 0.0, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu"},
    **{"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072},
    **{"mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
    **{"rope_scaling": SCALING, "rope_theta": 500000.0, "tie_word_embeddings": False},
    **{"torch_dtype": "bfloat16", "vocab_size": 128256},
}
MISTRAL_7B: dict[str, Any] = {
    **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "eos_token_id": 2},
    **{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336},
    **{"max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0},
    **{"sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    "vocab_size": 32000,
}
KIMI_K2: dict[str, Any] = {
    **{**DEEPSEEK_V3, "model_type": "kimi_k2", "auto_map": {"AutoConfig": "some.file.Config"}},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 163840},
    **{"max_position_embeddings": 131072, "rope_theta": 50000.0, "routed_scaling_factor": 2.827},
    **{"num_nextn_predict_layers": 0, "eos_token_id": 163586},
    "rope_scaling": {
        **DEEPSEEK_V3["rope_scaling"],
        **{"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    },
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def test_published_models_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN25_7B) == published.QWEN25_7B
    assert read(tmp_path, LLAMA_31_8B) == published.LLAMA_31_8B
    assert read(tmp_path, MISTRAL_7B) == published.MISTRAL_7B
    yarn = Yarn(32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    assert read(tmp_path, KIMI_K2) == replace(published.KIMI_K2, yarn=yarn)


def test_keys_of_transformers_5_mean_the_same(tmp_path: Path) -> None:
    old = {"rope_theta": ABSENT, "rope_scaling": ABSENT, "torch_dtype": ABSENT}
    new = {**old, "dtype": "bfloat16"}
    llama = {**SCALING, "rope_theta": 500000.0}
    assert read(tmp_path, LLAMA_31_8B, **new, rope_parameters=llama) == published.LLAMA_31_8B
    both = {**LLAMA_31_8B, "dtype": "bfloat16", "rope_parameters": llama, "rope_scaling": ABSENT}
    assert read(tmp_path, both) == published.LLAMA_31_8B
    assert read(tmp_path, MISTRAL_7B, **new, rope_parameters=PLAIN) == published.MISTRAL_7B
    qwen = {**PLAIN, "rope_theta": 1000000}
    kinds = ["full_attention"] * 28
    changes = {**new, "rope_parameters": qwen, "layer_types": kinds, "sliding_window": None}
    assert read(tmp_path, QWEN25_7B, **changes) == published.QWEN25_7B


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts", "num_local_experts"])
def test_every_spelling_of_the_number_of_experts_is_read(tmp_path: Path, key: str) -> None:
    spec = read(tmp_path, KIMI_K2, **{"n_routed_experts": ABSENT, key: 384})
    assert spec.experts == 384


def test_qwen2_has_windows_in_its_last_layers(tmp_path: Path) -> None:
    windowed = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 21}
    assert read(tmp_path, QWEN25_7B, **windowed).windows == (0,) * 21 + (512,) * 7
    kinds = ["full_attention"] * 21 + ["sliding_attention"] * 7
    assert (
        read(tmp_path, QWEN25_7B, **windowed, layer_types=kinds).windows == (0,) * 21 + (512,) * 7
    )
    none = {**windowed, "max_window_layers": 28}
    assert read(tmp_path, QWEN25_7B, **none).windows == ()
    assert read(tmp_path, QWEN25_7B, use_sliding_window=ABSENT).windows == ()


def test_llama_takes_transformers_values_for_absent_keys(tmp_path: Path) -> None:
    absent = ("num_key_value_heads", "rope_scaling", "rope_theta", "attention_bias", "mlp_bias")
    spec = read(tmp_path, LLAMA_31_8B, **dict.fromkeys(absent, ABSENT))
    assert (spec.kv_heads, spec.llama3, spec.rope_theta, spec.head_dim) == (32, None, 1e4, 128)
    assert not spec.qkv_bias and not spec.out_bias and not spec.qk_norm
    spec = read(tmp_path, LLAMA_31_8B, attention_bias=True)
    assert spec == replace(published.LLAMA_31_8B, qkv_bias=True, out_bias=True)
    assert read(tmp_path, LLAMA_31_8B, head_dim=64).head_dim == 64  # as Llama-3.2-1B


def test_mistral_without_windows_is_read(tmp_path: Path) -> None:
    """As Mistral-7B-v0.3, and Mistral-Nemo with its own size of a head."""
    spec = read(tmp_path, MISTRAL_7B, sliding_window=None, head_dim=96)
    assert spec == replace(published.MISTRAL_7B, windows=(), head_dim=96)


def test_a_spec_with_llama3_survives_json(tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA_31_8B)
    assert spec.llama3 == Llama3(8.0, 1.0, 4.0, 8192)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec


SLIDING = ["sliding_attention"]


@pytest.mark.parametrize(
    ("values", "changes", "says"),
    [
        (QWEN25_7B, {"attention_bias": False}, ["attention_bias", "False", "true"]),
        (QWEN25_7B, {"qkv_bias": False}, ["qkv_bias", "False", "true"]),
        (QWEN25_7B, {"num_key_value_heads": ABSENT}, ["num_key_value_heads", "integer"]),
        (
            QWEN25_7B,
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2},
            ["sliding_window", "None", "integer"],
        ),
        (QWEN25_7B, {"layer_types": SLIDING * 28}, ["layer_types and use_sliding_window", "False"]),
        (
            QWEN25_7B,
            {"layer_types": SLIDING * 28, "use_sliding_window": True},
            ["layer_types and max_window_layers", "28"],
        ),
        (QWEN25_7B, {"use_sliding_window": "no"}, ["use_sliding_window", "true or false"]),
        (QWEN25_7B, {"rope_scaling": SCALING}, ["rope_scaling.rope_type", "'llama3'"]),
        (QWEN25_7B, {"architectures": ["Qwen2ForReward"]}, ["Qwen2ForCausalLM"]),
        (LLAMA_31_8B, {"attention_bias": "yes"}, ["attention_bias", "'yes'", "true or false"]),
        (LLAMA_31_8B, {"mlp_bias": True}, ["mlp_bias", "True", "false"]),
        (LLAMA_31_8B, {"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        (LLAMA_31_8B, {"layer_types": SLIDING * 32}, ["layer_types"]),
        (
            LLAMA_31_8B,
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rope_scaling.type", "'linear'", "default or llama3 or yarn"],
        ),
        (
            LLAMA_31_8B,
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            ["rope_scaling.rope_type", "'longrope'"],
        ),
        (
            LLAMA_31_8B,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ["rope_scaling.low_freq_factor", "rope_scaling.high_freq_factor", "positive"],
        ),
        (
            LLAMA_31_8B,
            {"rope_scaling": {**SCALING, "low_freq_factor": 4.0}},
            ["low_freq_factor and high_freq_factor", "[4.0, 4.0]"],
        ),
        (LLAMA_31_8B, {"rope_scaling": {**SCALING, "beta_fast": 2}}, ["rope_scaling.beta_fast"]),
        (
            LLAMA_31_8B,
            {"rope_scaling": {**SCALING, "type": "yarn"}},
            ["rope_scaling.rope_type and rope_scaling.type", "['llama3', 'yarn']"],
        ),
        (
            LLAMA_31_8B,
            {"rope_parameters": {**SCALING, "factor": 32.0}},
            ["rope_parameters and rope_scaling", "32.0", "8.0"],
        ),
        (
            LLAMA_31_8B,
            {"rope_parameters": {**SCALING, "rope_theta": 1e4}, "rope_scaling": None},
            ["rope_theta and rope_parameters.rope_theta", "[500000.0, 10000.0]"],
        ),
        (LLAMA_31_8B, {"dtype": "float32"}, ["dtype and torch_dtype", "'float32', 'bfloat16'"]),
        (MISTRAL_7B, {"dtype": "float32"}, ["dtype and torch_dtype", "'float32', 'bfloat16'"]),
        (MISTRAL_7B, {"sliding_window": ABSENT}, ["sliding_window", "absent", "4096"]),
        (MISTRAL_7B, {"sliding_window": 0}, ["sliding_window", "0", "at least 1"]),
        (
            MISTRAL_7B,
            {"layer_types": ["full_attention"] * 32},
            ["layer_types and sliding_window", "4096"],
        ),
        (MISTRAL_7B, {"attention_bias": True}, ["attention_bias", "True"]),
        (KIMI_K2, {"num_experts": 256}, ["n_routed_experts and num_experts", "[384, 256]"]),
        (KIMI_K2, {"num_local_experts": 8}, ["n_routed_experts and num_local_experts", "[384, 8]"]),
        (KIMI_K2, {"rope_scaling": SCALING}, ["rope_scaling.rope_type", "'llama3'"]),
        (KIMI_K2, {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        (KIMI_K2, {"architectures": ["KimiK2ForCausalLM"]}, ["DeepseekV3ForCausalLM"]),
    ],
)
def test_a_value_that_is_not_supported_is_refused(
    tmp_path: Path, values: dict[str, Any], changes: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, values, **changes)
    for part in says:
        assert part in str(error.value)
