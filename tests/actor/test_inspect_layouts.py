"""Checkpoints that Megatron wrote in any layout are whole, and equal where their weights are."""

from pathlib import Path

import pytest
import torch

from megarl.checkpoint.inspect import check, compare, describe
from megarl.checkpoint.streamed import write_weights
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model

pytestmark = pytest.mark.dist

LAYOUTS = [{"tp": 2, "etp": 2}, {"dp": 2, "ep": 2, "etp": 1}]
CUT = [[8, 4, 1], [8, 2, 1]]  # experts, halves of gate and of up
EXPERTS = "decoder.layers.3.mlp.experts.experts.linear_fc1.weight"


def test_layouts_differ_in_chunks_and_not_in_values(pool: WorkerPool, tmp_path: Path) -> None:
    hf = save_model("glm4_moe", tmp_path / "hf", torch.bfloat16)
    (streamed := tmp_path / "streamed").mkdir()
    write_weights(streamed, open_checkpoint(hf), read_spec(hf))
    assert describe(streamed)["parts"][""]["ranks"] is None
    for i, layout in enumerate(LAYOUTS):
        (saved := tmp_path / f"saved{i}").mkdir()
        world = mesh_of(layout).world_size
        names = {"models": {"m": hf}, "paths": {"m": saved}}
        pool.run("tests.actor.work_streamed:save", world=world, layout=layout, **names)
        assert not check(saved)
        assert not compare(saved, streamed)
        part = describe(saved)["parts"][""]
        assert part["ranks"] == world
        assert part["tensors"][EXPERTS]["grid"] == CUT[i]


def test_a_runs_checkpoint_with_its_optimizer_is_whole(
    pool: WorkerPool, tiny_small: Path, tmp_path: Path
) -> None:
    """In another layout the same training gives other last bits: named are weights and moments."""
    optim = {"optim": {"lr": 1e-3, "distributed": True}}
    for name, layout in (("one", {}), ("two", {"dp": 2})):
        steps = {"path": tmp_path / name, "save_at": 1, "until": 1}
        world = mesh_of(layout).world_size
        work = "tests.actor.work_state:trained_on"
        pool.run(work, world=world, layout=layout, hf=tiny_small, **steps, **optim)
        assert not check(tmp_path / name)
    tensors = describe(tmp_path / "two")["parts"][""]["tensors"]
    moments = [key for key in tensors if key.startswith("optimizer.state.exp_avg.")]
    weights = [key for key in tensors if not key.startswith("optimizer.")]
    assert len(moments) == len(weights) > 10
    lines = compare(tmp_path / "one", tmp_path / "two")
    assert all(": other values " in line for line in lines)
    assert not compare(tmp_path / "two", tmp_path / "two")
