"""Models of every family made of Transformer Engine's modules: what their parameters are called,
what part of them a rank has, and the way of weights into them and out of them.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.models.mapping import mapping_for, padded_vocab_size
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import MODELS
from tests.te.names import DENSE_LAYERS, parameter_names

pytestmark = pytest.mark.dist

LAYOUTS = [{}, {"tp": 2}, {"dp": 2, "ep": 2}, {"pp": 2}, {"tp": 2, "ep": 2}]
KINDS = [True, False]  # experts in one module, or one by one
Tensors = dict[str, torch.Tensor]


def place(layout: dict[str, int], name: str) -> dict[str, int]:
    """Experts with biases are not split."""
    return {**layout, "etp": 1} if name.startswith("gpt_oss") or "ep" in layout else layout


def fits(layout: dict[str, int], name: str) -> bool:
    return "ep" not in layout or MODELS[name][0] in DENSE_LAYERS


def run(pool: WorkerPool, function: str, layout: dict[str, int], **arguments: Any) -> list[Any]:
    world = mesh_of(layout).world_size
    return pool.run(f"tests.te.{function}", world=world, layout=layout, **arguments)


def together(ranks: list[Tensors]) -> Tensors:
    found: Tensors = {}
    for rank in ranks:
        assert not found.keys() & rank.keys()
        found |= rank
    return found


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, (name, found[name].dtype)
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("grouped", KINDS, ids=["grouped", "one by one"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_names_and_shapes_are_those_that_the_mapping_has(
    te_pool: WorkerPool, families: dict[str, Path], layout: dict[str, int], grouped: bool
) -> None:
    for name, folder in families.items():
        if not fits(layout, name):
            continue
        moe = {"grouped_gemm": grouped}
        ranks = run(te_pool, "actions:parameters", place(layout, name), hf=folder, moe=moe)
        stages = layout.get("pp", 1)
        expected = parameter_names(name, folder, grouped=grouped, stages=stages)
        assert set().union(*ranks) == expected, name
        spec = read_spec(folder)
        mapping = mapping_for(spec, padded_vocab_size(spec.vocab, 64))
        hf = {t.name: torch.zeros(t.shape) for t in mapping.hf_spec()}
        for rank in ranks:
            for parameter, (shape, at, size) in rank.items():
                index = mapping.slice_of(parameter)
                whole = [
                    hf[n] if index is None else hf[n][index] for n in mapping.hf_names(parameter)
                ]
                part = mapping.to_megatron(parameter, whole, tp_rank=at, tp_size=size)
                assert shape == tuple(part.shape), (name, parameter)


@pytest.mark.parametrize("grouped", KINDS, ids=["grouped", "one by one"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_of_files_come_out_bit_for_bit(
    te_pool: WorkerPool, families: dict[str, Path], layout: dict[str, int], grouped: bool
) -> None:
    for name, folder in families.items():
        if not fits(layout, name):
            continue
        moe = {"grouped_gemm": grouped}
        ranks = run(te_pool, "actions:exported", place(layout, name), hf=folder, moe=moe)
        assert_same_bits(together(ranks), load_file(folder / "model.safetensors"))


# Transformer Engine's names -> those of local layers
LOCAL_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"linear_(q|kv)_up_proj\.layer_norm_", r"\1_layernorm."),
    (r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"experts.local_experts.\3.\1.\2"),
)


def local_name(name: str) -> str:
    for pattern, local in LOCAL_NAMES:
        name = re.sub(pattern, local, name)
    return name


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_gradients_are_reduced_over_the_ranks_that_those_of_local_layers_are(
    local_pool: WorkerPool, te_pool: WorkerPool, families: dict[str, Path], layout: dict[str, int]
) -> None:
    """By what Megatron reads off a parameter: whether tensor-parallel ranks have copies of it and
    parts of the sequence, which group it is reduced over, and whether it is split.
    """
    for name, folder in families.items():
        if not fits(layout, name):
            continue
        here = {"layout": place(layout, name), "hf": folder}
        te = run(te_pool, "work_marks:marks", **here, moe={"grouped_gemm": True})
        local = run(local_pool, "work_marks:marks", **here)
        for of_te, of_local in zip(te, local, strict=True):
            assert {local_name(n): marks for n, marks in of_te.items()} == of_local, name
            assert {tuple(marks.values()) for marks in of_local.values()} >= {
                *((True, True, False), (False, True, True))  # norms, attention's matrices
            }


def test_the_table_has_every_family() -> None:
    assert {family for family, _ in MODELS.values()} == {
        *("qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"),
        *("kimi_k2", "llama", "mistral"),
    }
