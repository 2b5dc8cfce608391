"""D5: what a checkpoint says of its model against config.json, one value at a time."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.models import (
    NOT_OF_THE_BODY,
    config_contradictions,
    require_no_contradictions,
    stored_spec,
)
from megarl.errors import DataError
from megarl.models.parts import DeltaNet, Mla, Yarn
from megarl.models.spec import ModelSpec, read_spec
from tests.helpers.families import SIGMOID_MOE

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
QWEN = {
    **COMMON,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
SIGMOID = {
    **SIGMOID_MOE,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK = {
    **{k: v for k, v in COMMON.items() if k != "head_dim"},
    **SIGMOID,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
GPT_OSS = {
    **COMMON,
    "model_type": "gpt_oss",
    "intermediate_size": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
}
MODELS = {"qwen3_moe": QWEN, "deepseek_v3": DEEPSEEK, "gpt_oss": GPT_OSS}


def folder_of(path: Path, config: Mapping[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def checkpoint_of(path: Path, config: Mapping[str, Any]) -> Path:
    spec = read_spec(folder_of(path, config))
    (path / "model.json").write_text(json.dumps(spec.as_json()))
    return path / "model.json"


@pytest.mark.parametrize(
    ("model", "key", "value", "says"),
    [
        ("qwen3_moe", "rope_theta", 1e4, "rope_theta: 1000000.0 in {}, 10000.0 in {}"),
        ("qwen3_moe", "num_hidden_layers", 3, "layers: 4 in {}, 3 in {}"),
        ("qwen3_moe", "num_experts", 16, "experts: 8 in {}, 16 in {}"),
        ("qwen3_moe", "num_experts_per_tok", 4, "topk: 2 in {}, 4 in {}"),
        ("qwen3_moe", "rms_norm_eps", 1e-5, "norm_eps: 1e-06 in {}, 1e-05 in {}"),
        ("qwen3_moe", "tie_word_embeddings", True, "tie_embeddings: False in {}, True in {}"),
        ("qwen3_moe", "norm_topk_prob", False, "norm_topk_prob: True in {}, False in {}"),
        ("qwen3_moe", "head_dim", 8, "head_dim: 6 in {}, 8 in {}"),
        ("qwen3_moe", "num_key_value_heads", 2, "kv_heads: 4 in {}, 2 in {}"),
        ("qwen3_moe", "model_type", "qwen3", "family: qwen3_moe in {}, qwen3 in {}"),
        ("qwen3_moe", "mlp_only_layers", [2], "(True, True, True, True) in {}, (True, True, False"),
        ("deepseek_v3", "routed_scaling_factor", 1.0, "routed_scale: 2.5 in {}, 1.0 in {}"),
        ("deepseek_v3", "n_group", 2, "router_groups: 4 in {}, 2 in {}"),
        ("deepseek_v3", "num_nextn_predict_layers", 0, "mtp_layers: 1 in {}, 0 in {}"),
        ("deepseek_v3", "v_head_dim", 16, "mla: "),
        ("deepseek_v3", "rope_scaling", None, "yarn: {{'factor': 4.0"),
        ("gpt_oss", "sliding_window", 7, "windows: (6, 0, 6, 0) in {}, (7, 0, 7, 0) in {}"),
        ("gpt_oss", "swiglu_limit", 5.0, "glu_limit: 7.0 in {}, 5.0 in {}"),
    ],
)
def test_a_changed_value_is_refused_with_both(
    tmp_path: Path, model: str, key: str, value: Any, says: str
) -> None:
    values = {**MODELS[model], "rope_theta": 1e6}
    if model == "gpt_oss":
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    stored = checkpoint_of(tmp_path / "checkpoint", values)
    hf = folder_of(tmp_path / "hf", {**values, key: value})
    found = config_contradictions(stored, read_spec(hf), hf)
    message = says.format(stored, hf / "config.json")
    assert any(message in line for line in found), found
    with pytest.raises(DataError, match=r"describe different models \(\d contradiction"):
        require_no_contradictions(found)
    assert not config_contradictions(stored, read_spec(tmp_path / "checkpoint"), hf)


def test_all_contradictions_are_named_together(tmp_path: Path) -> None:
    stored = checkpoint_of(tmp_path / "checkpoint", QWEN)
    hf = folder_of(tmp_path / "hf", {**QWEN, "rope_theta": 1e4, "num_experts_per_tok": 4})
    found = config_contradictions(stored, read_spec(hf), hf)
    with pytest.raises(DataError) as error:
        require_no_contradictions([*found, *found])  # of two checkpoints that are one
    lines = str(error.value).splitlines()
    assert "(2 contradictions)" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["topk", "rope_theta"]


OTHER: dict[str, Any] = {  # of fields that are not a number, a flag or a word
    "moe_layers": (True, True, True, False),
    "windows": (1, 2, 3, 4),
    "linear_layers": (True, False, True, True),
    "yarn": Yarn(4.0, 16, 32.0, 1.0, 1.0, 0.0, True),
    "mla": Mla(q_rank=1, kv_rank=2, nope_dim=3, rope_dim=4, value_dim=5),
    "delta_net": None,
}


def test_every_dimension_is_compared(tmp_path: Path) -> None:
    """But the dtype of files and the end tokens, which do not change what weights compute."""
    stored = checkpoint_of(tmp_path / "checkpoint", QWEN)
    spec = stored_spec(stored)
    widths = {f.name: 1 for f in dataclasses.fields(DeltaNet)}
    others = {**OTHER, "delta_net": DeltaNet(**widths)}
    for field in dataclasses.fields(ModelSpec):
        value = getattr(spec, field.name)
        if field.name in others:
            other = others[field.name]
        elif isinstance(value, bool):
            other = not value
        elif isinstance(value, int | float):
            other = value + 1
        else:
            other = "another" if isinstance(value, str) else (7,)
        changed = dataclasses.replace(spec, **{field.name: other})
        found = config_contradictions(stored, changed, tmp_path)
        if field.name in ("dtype", "eos_ids"):
            assert not found
        else:
            assert [line.split(":")[0] for line in found] == [field.name]
            assert f": {value} in {stored}, " in found[0]


def test_a_value_head_s_body_may_be_tied_otherwise(tmp_path: Path) -> None:
    stored = checkpoint_of(tmp_path / "checkpoint", QWEN)
    tied = {**QWEN, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    hf = folder_of(tmp_path / "hf", tied)
    found = config_contradictions(stored, read_spec(hf), hf, NOT_OF_THE_BODY)
    assert [line.split(":")[0] for line in found] == ["norm_eps"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "expected a JSON object"),
        ("{}", "a stored model spec has other fields"),
        ('{"wheels": 4}', "a stored model spec has other fields"),
    ],
)
def test_a_model_file_that_is_none_is_named(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "model.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=says) as error:
        stored_spec(path)
    assert str(path) in str(error.value)
