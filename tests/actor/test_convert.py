"""The converters: exact both ways; a damaged folder is refused by name, nothing left behind."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist


def convert(pool: WorkerPool, tool: str, source: Path, out: Path) -> str | None:
    (error,) = pool.run("tests.actor.work:convert", world=1, tool=tool, source=source, out=out)
    return error


def test_there_and_back_is_the_same_model_bit_for_bit(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert convert(pool, "convert_hf_to_megatron", tiny_model, megatron) is None
    assert convert(pool, "convert_megatron_to_hf", megatron, back) is None
    first, second = (load_file(p / "model.safetensors") for p in (tiny_model, back))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (back / name).read_bytes() == (tiny_model / name).read_bytes()


def without_a_tensor(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")


def with_a_stranger(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.9.mlp.gate.weight"] = torch.zeros(8, 64)
    save_file(tensors, model / "model.safetensors")


def cut_short(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-1])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (without_a_tensor, "missing model.layers.2.mlp.experts.5.up_proj.weight [40, 64]"),
        (with_a_stranger, "not part of the model: model.layers.9.mlp.gate.weight"),
        (cut_short, "model.safetensors"),
    ],
)
def test_a_damaged_folder_is_refused_and_leaves_nothing(
    pool: WorkerPool,
    tiny_model: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    named: str,
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(tiny_model, model)
    damage(model)
    error = convert(pool, "convert_hf_to_megatron", model, out)
    assert error is not None and error.startswith("DataError") and named in error, error
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_existing_checkpoint_is_never_overwritten(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    error = convert(pool, "convert_hf_to_megatron", tiny_model, tmp_path / "out")
    assert error is not None and "already exists" in error
