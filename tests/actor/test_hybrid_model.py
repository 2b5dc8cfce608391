"""What docs/hybrid-model.md says of upstream's HybridModel. When one of these fails, upstream has
moved and the page is to be read again.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model

pytestmark = pytest.mark.dist

LAYOUTS = [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}, {"cp": 2}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    names = ("qwen3", "qwen3_moe yarn", "deepseek_v3 direct queries", "gpt_oss")
    return {name: save_model(name, folder / name.replace(" ", "_")) for name in names}


def compared(pool: WorkerPool, hf: Path, layout: dict[str, int]) -> list[dict[str, Any]]:
    world = mesh_of(layout).world_size
    return pool.run("tests.actor.work_hybrid:compare", world=world, hf=hf, layout=layout)


def assert_same_bits(ranks: list[dict[str, Any]]) -> None:
    assert any(rank["gpt"]["logprobs"] for rank in ranks)
    for rank in ranks:
        gpt, hybrid = rank["gpt"], rank["hybrid"]
        pairs = zip(gpt["logprobs"], hybrid["logprobs"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert gpt["gradients"].keys() == hybrid["gradients"].keys()
        for name, g in gpt["gradients"].items():
            assert torch.equal(g, hybrid["gradients"][name]), name


def test_it_computes_the_same_bits_under_other_names(
    pool: WorkerPool, models: dict[str, Path]
) -> None:
    for name, hf in models.items():
        (rank,) = ranks = compared(pool, hf, {})
        assert_same_bits(ranks)
        numbers = re.findall(r"decoder\.layers\.(\d+)\.", " ".join(rank["names"]))
        assert set(map(int, numbers)) == set(range(8)), name  # of a model of 4 layers


def test_keys_of_checkpoints_name_other_layers(pool: WorkerPool, models: dict[str, Path]) -> None:
    (rank,) = compared(pool, models["qwen3_moe yarn"], {})
    gpt, hybrid = set(rank["gpt"]["keys"]), set(rank["hybrid"]["keys"])
    norm = "decoder.layers.{}.self_attention.q_layernorm.weight"
    assert norm.format(2) in gpt & hybrid  # layer 2 of one model, layer 1 of the other
    assert norm.format(3) in gpt - hybrid and norm.format(6) in hybrid - gpt
    assert "decoder.final_layernorm.weight" in gpt and "decoder.final_norm.weight" in hybrid


def test_upstreams_stack_wants_the_norm_of_transformer_engine(
    pool: WorkerPool, models: dict[str, Path]
) -> None:
    with pytest.raises(AssertionError, match="Transformer Engine is not installed"):
        pool.run("tests.actor.work_hybrid:without_a_norm_of_its_own", world=1, hf=models["qwen3"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_computes_the_same_bits_in_a_layout(
    pool: WorkerPool, models: dict[str, Path], layout: dict[str, int]
) -> None:
    assert_same_bits(compared(pool, models["qwen3_moe yarn"], layout))
