"""config.json is read right, or refused with the key, the value found and the values accepted."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import DataError
from megarl.models.spec import ModelSpec, read_spec

Saved = Callable[[str], Path]
ABSENT = object()


def edited(folder: Path, out: Path, generation: Any = None, **changes: Any) -> Path:
    """A copy of a model's config.json with some keys changed or (ABSENT) removed."""
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    out.mkdir(exist_ok=True)
    kept = {k: v for k, v in config.items() if v is not ABSENT}
    (out / "config.json").write_text(json.dumps(kept))
    if generation is not None:
        (out / "generation_config.json").write_text(json.dumps(generation))
    return out


def test_a_moe_model_is_read(saved: Saved) -> None:
    assert read_spec(saved("moe")) == ModelSpec(
        family="qwen3_moe",
        hidden=32,
        layers=3,
        heads=8,
        kv_heads=4,
        head_dim=6,
        ffn=72,
        moe_ffn=20,
        experts=6,
        topk=2,
        vocab=50,
        rope_theta=5e4,
        norm_eps=1e-6,
        tie_embeddings=False,
        qk_norm=True,
        norm_topk_prob=True,
        moe_layers=(True, True, True),
        router_score="softmax",
        max_positions=64,
        dtype="float32",
        eos_ids=(1,),
    )


def test_a_dense_model_is_read(saved: Saved) -> None:
    spec = read_spec(saved("dense_tied"))
    assert (spec.family, spec.experts, spec.moe_ffn, spec.topk) == ("qwen3", 0, 0, 0)
    assert spec.moe_layers == (False, False, False)
    assert spec.num_moe_layers == 0
    assert spec.tie_embeddings


def test_the_pattern_of_moe_layers(saved: Saved, tmp_path: Path) -> None:
    assert read_spec(saved("moe_with_dense_layers")).moe_layers == (False, True, True)
    assert read_spec(saved("moe_every_second_layer")).moe_layers == (False, True, False)
    both = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = read_spec(edited(saved("moe"), tmp_path / "m", **both))
    assert spec.moe_layers == (False, True, False, False, False, True)


def test_old_keys_mean_the_same(saved: Saved, tmp_path: Path) -> None:
    """Files of transformers 4: rope_theta, torch_dtype, num_experts."""
    old = {
        "rope_parameters": ABSENT,
        "rope_theta": 50000,
        "rope_scaling": None,
        "dtype": ABSENT,
        "torch_dtype": "float32",
        "num_local_experts": ABSENT,
        "num_experts": 6,
    }
    assert read_spec(edited(saved("moe"), tmp_path / "m", **old)) == read_spec(saved("moe"))


def test_harmless_keys_of_published_models_pass(saved: Saved, tmp_path: Path) -> None:
    """As in Qwen3-30B-A3B, its successors, and Qwen3-Coder."""
    published = {
        "rope_scaling": None,
        "sliding_window": None,
        "max_window_layers": 48,
        "qkv_bias": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "initializer_range": 0.02,
        "bos_token_id": 4,
        "transformers_version": "4.51.0",
    }
    assert read_spec(edited(saved("moe"), tmp_path / "m", **published)) == read_spec(saved("moe"))


def test_absent_keys_take_transformers_values(saved: Saved, tmp_path: Path) -> None:
    absent = ("rope_parameters", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")
    changes = dict.fromkeys((*absent, "head_dim", "tie_word_embeddings"), ABSENT)
    spec = read_spec(edited(saved("moe"), tmp_path / "m", **changes))
    assert (spec.rope_theta, spec.norm_topk_prob, spec.head_dim) == (10000.0, False, 4)
    assert spec.moe_layers == (True,) * 3
    assert not spec.tie_embeddings


def test_end_tokens_of_both_files_end_a_response(saved: Saved, tmp_path: Path) -> None:
    folder = edited(saved("moe"), tmp_path / "a", {"eos_token_id": [7, 1]}, eos_token_id=1)
    assert read_spec(folder).eos_ids == (1, 7)
    folder = edited(saved("moe"), tmp_path / "b", {"eos_token_id": 3}, eos_token_id=None)
    assert read_spec(folder).eos_ids == (3,)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "model_type",
            "gemma2",
            [
                *("model_type", "'gemma2'", "deepseek_v3, glm4_moe, gpt_oss, kimi_k2, llama, "),
                "llama, mistral, qwen2, qwen3, qwen3_moe",
            ],
        ),
        (
            "model_type",
            "qwen3_next",
            ["'qwen3_next'", "qwen3_moe (qwen3_next: ", "packed sequences"],
        ),
        ("architectures", ["Qwen3MoeForTokenClassification"], ["Qwen3MoeForCausalLM"]),
        ("num_hidden_layers", ABSENT, ["num_hidden_layers", "None", "integer"]),
        ("hidden_size", "64", ["hidden_size", "'64'", "integer"]),
        ("vocab_size", 0, ["vocab_size", "0", "at least 1"]),
        ("num_key_value_heads", 3, ["num_key_value_heads", "3", "num_attention_heads=8"]),
        ("head_dim", 5, ["head_dim", "5", "even"]),
        ("num_experts_per_tok", 7, ["num_experts_per_tok", "7", "num_experts=6"]),
        ("num_experts", 5, ["num_experts and num_local_experts", "[5, 6]", "equal"]),
        ("hidden_act", "gelu", ["hidden_act", "'gelu'", "silu"]),
        ("attention_bias", True, ["attention_bias", "True", "false"]),
        ("use_sliding_window", True, ["use_sliding_window", "True"]),
        ("layer_types", ["sliding_attention"] * 3, ["layer_types", "full_attention"]),
        ("layer_types", ["full_attention"] * 2, ["layer_types", "num_hidden_layers=3"]),
        ("attention_dropout", 0.1, ["attention_dropout", "0.1"]),
        ("partial_rotary_factor", 0.5, ["partial_rotary_factor", "0.5"]),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0},
            ["rope_scaling.original_max_position_embeddings", "None"],
        ),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, ["rope_scaling.type", "'linear'"]),
        (
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            ["partial_rotary_factor", "0.5"],
        ),
        ("rope_theta", 1e6, ["rope_theta and rope_parameters.rope_theta", "[1000000.0, 50000.0]"]),
        ("rope_parameters", {"rope_theta": -1.0}, ["rope_theta", "-1.0", "positive"]),
        ("rms_norm_eps", ABSENT, ["rms_norm_eps", "None", "positive"]),
        ("tie_word_embeddings", "false", ["tie_word_embeddings", "'false'", "true or false"]),
        ("norm_topk_prob", 1, ["norm_topk_prob", "1", "true or false"]),
        ("mlp_only_layers", [3], ["mlp_only_layers", "[3]", "num_hidden_layers=3"]),
        ("decoder_sparse_step", 0, ["decoder_sparse_step", "0", "at least 1"]),
        ("decoder_sparse_step", 4, ["decoder_sparse_step", "4", "at least one layer of experts"]),
        ("mlp_only_layers", [0, 1, 2], ["mlp_only_layers=[0, 1, 2]", "at least one layer"]),
        ("shared_expert_intermediate_size", 16, ["shared_expert_intermediate_size", "16"]),
        ("n_shared_experts", 1, ["n_shared_experts", "1"]),
        ("scoring_func", "sigmoid", ["scoring_func", "'sigmoid'", "softmax"]),
        ("routed_scaling_factor", 2.5, ["routed_scaling_factor", "2.5"]),
        ("num_nextn_predict_layers", 1, ["num_nextn_predict_layers", "1"]),
        (
            "quantization_config",
            {"quant_method": "fp8"},
            ["quantization_config.weight_block_size", "None", "scales of whole tensors are not"],
        ),
        ("dtype", "float16", ["dtype", "'float16'", "bfloat16"]),
        ("torch_dtype", "bfloat16", ["dtype and torch_dtype", "'float32', 'bfloat16'"]),
        ("eos_token_id", None, ["eos_token_id", "None"]),
        ("eos_token_id", 50, ["eos_token_id", "50", "vocab_size=50"]),
    ],
)
def test_a_value_that_is_not_supported_is_refused(
    saved: Saved, tmp_path: Path, key: str, value: Any, says: list[str]
) -> None:
    folder = edited(saved("moe"), tmp_path / "m", **{key: value})
    with pytest.raises(DataError) as error:
        read_spec(folder)
    for part in [str(folder / "config.json"), *says]:
        assert part in str(error.value)


def test_every_problem_is_reported_at_once(saved: Saved, tmp_path: Path) -> None:
    changes = {"attention_bias": True, "hidden_act": "relu", "rope_theta": 7.0}
    with pytest.raises(DataError) as error:
        read_spec(edited(saved("dense"), tmp_path / "m", **changes))
    assert all(key in str(error.value) for key in changes)


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"config\.json"):
        read_spec(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json does not exist"):
        read_spec(tmp_path)


def test_a_spec_survives_json(saved: Saved) -> None:
    spec = read_spec(saved("moe_every_second_layer"))
    assert ModelSpec.from_json(json.loads(json.dumps(spec.as_json()))) == spec
    with pytest.raises(DataError, match="heads"):
        ModelSpec.from_json({k: v for k, v in spec.as_json().items() if k != "heads"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 1e6),
        ("layers", 4),
        ("experts", 8),
        ("topk", 1),
        ("norm_eps", 1e-5),
        ("tie_embeddings", True),
        ("norm_topk_prob", False),
    ],
)
def test_two_descriptions_of_one_model_are_compared(saved: Saved, field: str, value: Any) -> None:
    """D5: a checkpoint says one thing and config.json another; both values are shown."""
    spec = read_spec(saved("moe"))
    (problem,) = spec.differences(dataclasses.replace(spec, **{field: value}))
    found, accepted = str(getattr(spec, field)), str(value)
    assert (problem.key, problem.found, problem.accepted) == (field, found, accepted)
    assert spec.differences(dataclasses.replace(spec, dtype="bfloat16", eos_ids=(2,))) == []
