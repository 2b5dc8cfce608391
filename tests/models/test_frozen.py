"""What ``train.frozen`` names, and what it may not."""

import dataclasses
import json
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.models.frozen import frozen_parameters
from megarl.models.spec import ModelSpec, read_spec
from tests.conftest import make_tiny_model
from tests.models.test_spec_families import DEEPSEEK_V3


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_tiny_model(tmp_path_factory.mktemp("frozen") / "model"))


LAYER = "decoder.layers.{}."


@pytest.mark.parametrize(
    ("pattern", "frozen", "free"),
    [
        ("model.embed_tokens.weight", "embedding.word_embeddings.weight", "output_layer.weight"),
        ("*.mlp.gate.weight", LAYER.format(3) + "mlp.router.weight", "output_layer.weight"),
        (
            "model.layers.[0-1].*",
            LAYER.format(1) + "self_attention.linear_qkv.weight",
            LAYER.format(2) + "self_attention.linear_qkv.weight",
        ),
        (
            "decoder.layers.2.mlp.experts.local_experts.*",
            LAYER.format(2) + "mlp.experts.local_experts.7.linear_fc1.weight",
            LAYER.format(1) + "mlp.experts.local_experts.7.linear_fc1.weight",
        ),
        (  # named by one spelling of Hugging Face, found in both of Megatron's
            "model.layers.0.input_layernorm.weight",
            LAYER.format(0) + "self_attention.linear_qkv.layer_norm_weight",
            LAYER.format(1) + "input_layernorm.weight",
        ),
        ("model.norm.*", "decoder.final_layernorm.weight", "output_layer.weight"),
    ],
)
def test_a_pattern_is_of_whole_names_of_either_library(
    spec: ModelSpec, pattern: str, frozen: str, free: str
) -> None:
    found = frozen_parameters([pattern], spec)
    assert found.is_frozen(frozen) and not found.is_frozen(free)
    assert not frozen_parameters([], spec).is_frozen(frozen)


@pytest.mark.parametrize(
    ("pattern", "biases", "routers"),
    [
        ("model.layers.3.mlp.gate.weight", {3}, {3}),
        ("model.layers.[45].*", {4, 5}, {4, 5}),
        ("*.4.mlp.gate.e_score_correction_bias", {4}, set()),
        ("decoder.layers.5.mlp.router.expert_bias", {5}, set()),
        ("decoder.layers.?.mlp.router.*", {3, 4, 5}, {3, 4, 5}),
        ("model.embed_tokens.*", set(), set()),
    ],
)
def test_an_expert_bias_stays_with_its_router_or_by_itself(
    tmp_path: Path, pattern: str, biases: set[int], routers: set[int]
) -> None:
    changes = {"num_hidden_layers": 6, "n_routed_experts": 16, "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK_V3, **changes}))
    found = frozen_parameters([pattern], read_spec(tmp_path))
    for kind, expected in (("expert_bias", biases), ("weight", routers)):
        name = "decoder.layers.{}.mlp.router." + kind
        assert {k for k in (3, 4, 5) if found.is_frozen(name.format(k))} == expected


def test_tied_embeddings_are_one_tensor(spec: ModelSpec) -> None:
    tied = dataclasses.replace(spec, tie_embeddings=True)
    found = frozen_parameters(["model.embed_tokens.weight"], tied)
    assert found.is_frozen("embedding.word_embeddings.weight")
    assert found.is_frozen("output_layer.weight")


@pytest.mark.parametrize(
    ("patterns", "key", "found", "accepted"),
    [
        (
            ["model.embed_token.weight"],
            "train.frozen[0]",
            "model.embed_token.weight",
            "model.embed",
        ),
        (
            ["*.mlp.gate.weight", "*.mlp.gat.weight"],
            "train.frozen[1]",
            "gat.",
            "layers.*.mlp.gate.",
        ),
        (["model.layers.9.*"], "train.frozen[0]", "layers.9", "model.layers.*"),
        (["embed_tokens"], "train.frozen[0]", "embed_tokens", "model.embed_tokens.weight"),
        (
            ["*.q_proj.weight"],
            "train.frozen",
            "q_proj",
            "self_attn.v_proj.weight as well: Megatron",
        ),
        (["*.experts.0.up_proj.*"], "train.frozen", "up_proj", "gate_proj.weight as well"),
        (["*.experts.5.*"], "train.frozen", "local_experts.*.linear_fc1", "all experts of a layer"),
        (["model.layers.2.mlp.experts.[0-3].*"], "train.frozen", "layers.2.mlp", "or none"),
        (["*local_experts.1.linear_fc2.*"], "train.frozen", "linear_fc2", "as one tensor"),
        (["*"], "train.frozen", "['*']", "leave something"),
    ],
)
def test_what_names_nothing_a_part_or_everything_is_refused(
    spec: ModelSpec, patterns: list[str], key: str, found: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as error:
        frozen_parameters(patterns, spec)
    (problem,) = error.value.problems
    assert problem.key == key
    assert found in problem.found and accepted in problem.accepted, problem
