"""Every family's weights survive files, layouts, precision and training: bit for bit what should,
and what a step trains is all of the rest.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import WITHOUT_EXPERTS, frozen_names, save_model
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

WITH_BUFFERS = ["deepseek_v3", "glm4_moe without qk norm"]  # and layers behind the last
EXPORTED = [*WITH_BUFFERS, "qwen3 yarn tied", "deepseek_v3 direct queries", "gpt_oss"]
EXPORTED += ["qwen2 windows tied", "llama biases tied", "kimi_k2"]
LAYOUTS = [{"tp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}]
OPTIM = {"lr": 1e-3, "distributed": True}
BF16: dict[str, Any] = {"precision": {"dtype": "bf16"}, "optim": OPTIM}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def bf16_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bf16")
    names = enumerate(EXPORTED)
    return {name: save_model(name, folder / str(i), torch.bfloat16) for i, name in names}


KINDS = ("weight", "bias")
OF_A_LAYER = [
    "input_layernorm.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
    "mlp.router.expert_bias",
    "mlp.router.weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "pre_mlp_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_q_up_proj.weight",
]
KEYS = {  # of DeepSeek-V3 by Transformer Engine's layer spec (megatron-core 0.19.2, TE 2.20.2)
    *(f"decoder.layers.N.{key}" for key in OF_A_LAYER),
    *(f"mtp.layers.N.transformer_layer.{key}" for key in OF_A_LAYER),
    *(f"mtp.layers.N.{key}.weight" for key in ("eh_proj", "enorm", "hnorm", "final_layernorm")),
    *(f"decoder.layers.N.mlp.linear_{key}.weight" for key in ("fc1", "fc2")),
    "decoder.layers.N.mlp.linear_fc1.layer_norm_weight",
    "embedding.word_embeddings.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
}


def run(pool: WorkerPool, work: str, layout: dict[str, int], **arguments: Any) -> list[Any]:
    world = mesh_of(layout).world_size
    return pool.run(f"tests.actor.{work}", world=world, layout=layout, **arguments)


def together(ranks: list[Any], part: str | None = None) -> Tensors:
    """Of all ranks; each tensor once."""
    parts = [r if part is None else r[part] for r in ranks]
    names = [n for p in parts for n in p]
    assert len(names) == len(set(names))
    return {n: t for p in parts for n, t in p.items()}


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, (name, found[name].dtype)
        assert torch.equal(found[name], tensor), name


def without_experts(layout: dict[str, int], name: str) -> bool:
    return layout.get("ep", 1) > 1 and name in WITHOUT_EXPERTS


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_trainer_in_bf16_exports_what_it_was_given_bit_for_bit(
    pool: WorkerPool, bf16_models: dict[str, Path], layout: dict[str, int]
) -> None:
    for name, folder in bf16_models.items():
        if without_experts(layout, name):
            continue
        place = {**layout, "etp": 1} if name == "gpt_oss" else layout  # experts with biases
        ranks = run(pool, "work:exported", place, hf=folder, precision={"dtype": "bf16"})
        assert_same_bits(together(ranks, "tensors"), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("name", [*WITH_BUFFERS, "kimi_k2", "llama biases tied", "mistral"])
def test_steps_train_all_but_what_they_must_not(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    """Nor does swapping in the reference policy's weights and back change any of it."""
    folder = save_model(name, tmp_path / "model")
    given, frozen = load_file(folder / "model.safetensors"), frozen_names(folder)
    kinds = {n.rpartition(".")[2] for n in frozen}
    of_choice = set() if name in WITHOUT_EXPERTS else {"e_score_correction_bias"}
    assert kinds >= of_choice | ({"weight"} if name in WITH_BUFFERS else set())
    (found,) = run(pool, "work_families:after_a_step", {}, hf=folder)
    assert_same_bits(found["reference"], given)
    after = found["after"]
    assert after.keys() == given.keys()
    still = {n for n, t in given.items() if torch.equal(after[n], t)}
    assert frozen <= still
    assert not [n for n in still - frozen if ".mlp.experts." not in n]  # some see no token


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"dp": 2, "ep": 2}, {"pp": 2, "vpp": 2}),
        pytest.param({"pp": 2}, {"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_in_bf16_that_passed_through_layouts_lost_no_bit(
    pool: WorkerPool,
    bf16_models: dict[str, Path],
    tmp_path: Path,
    first: dict[str, int],
    then: dict[str, int],
) -> None:
    for name in WITH_BUFFERS:
        folder, saved, again = bf16_models[name], tmp_path / f"{name} 1", tmp_path / f"{name} 2"
        steps = {"save_at": 1, "until": 1}
        ranks = run(pool, "work_state:trained_on", first, hf=folder, path=saved, **steps, **BF16)
        run(pool, "work_state:passed_on", then, hf=folder, path=saved, out=again, **BF16)
        found = run(pool, "work_state:loaded_weights", {}, hf=folder, path=again, **BF16)
        expected = together(ranks, "after")
        assert_same_bits(together(found), expected)
        given = load_file(folder / "model.safetensors")
        assert_same_bits(
            {n: expected[n] for n in frozen_names(folder)},
            {n: given[n] for n in frozen_names(folder)},
        )


def test_layers_behind_the_last_change_no_bit_of_what_is_computed(
    pool: WorkerPool, tmp_path: Path
) -> None:
    folder = save_model("glm4_moe", tmp_path / "model")
    (with_them,) = run(pool, "work_families:after_a_step", {}, hf=folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.startswith("model.layers.4.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (without,) = run(pool, "work_families:after_a_step", {}, hf=folder)
    assert_same_bits(without["after"], {n: with_them["after"][n] for n in kept})


def test_checkpoint_keys_are_those_of_transformer_engine(
    pool: WorkerPool, bf16_models: dict[str, Path]
) -> None:
    work = "work_families:checkpoint_keys"
    (found,) = run(pool, work, {}, hf=bf16_models["deepseek_v3"])
    assert found == KEYS


def test_checkpoint_keys_of_sinks_biases_and_windowed_layers(
    pool: WorkerPool, bf16_models: dict[str, Path]
) -> None:
    """Sinks have the name of Transformer Engine's attention, too."""
    (found,) = run(pool, "work_families:checkpoint_keys", {}, hf=bf16_models["gpt_oss"])
    layer = {
        "self_attention.core_attention.softmax_offset",
        "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight",
        *(f"self_attention.linear_{x}.{kind}" for x in ("qkv", "proj") for kind in KINDS),
        *(f"mlp.experts.experts.linear_fc{n}.{kind}" for n in (1, 2) for kind in KINDS),
        *(f"mlp.router.{kind}" for kind in KINDS),
    }
    outside = {key for key in KEYS if not key.startswith(("decoder.layers.", "mtp."))}
    assert found == outside | {f"decoder.layers.N.{key}" for key in layer}


@pytest.mark.parametrize("name", [*WITH_BUFFERS, "gpt_oss"])
def test_a_critic_of_the_family_values_hidden_states(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(name, tmp_path / "model")
    head = 0.1 * torch.randn(32, generator=torch.Generator().manual_seed(1))
    samples = [replace(s, values=0 * s.rollout_logprobs) for s in random_samples(3, 2, seed=2)]
    (found,) = run(pool, "work_critic:first_step", {}, hf=folder, samples=samples, head=head)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(found["values"]) == len(samples)
    for i, values in found["values"].items():
        ids = torch.from_numpy(samples[i].tokens).long()[None]
        with torch.no_grad():
            expected = model.model(ids).last_hidden_state[0] @ head
        assert expected.std() > 0.05
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
