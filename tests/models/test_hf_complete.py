"""Layers for multi-token prediction in a folder: all of them, or config.json says none."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import DataError
from megarl.models.hf_complete import check_complete
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec

Tensors = dict[str, Tensor]
BEHIND = "model.layers.4."


@pytest.fixture
def model(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    folder: Path = shutil.copytree(saved("deepseek_v3"), tmp_path / "model")
    return folder


def check(folder: Path, edit: Callable[[Tensors], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    check_complete(open_checkpoint(folder), read_spec(folder))


def test_copies_of_embedding_and_head_may_be_absent(model: Path) -> None:
    def without(tensors: Tensors) -> None:
        del tensors[BEHIND + "embed_tokens.weight"], tensors[BEHIND + "shared_head.head.weight"]

    check(model, lambda tensors: None)
    check(model, without)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_copy_that_differs_is_refused(model: Path, name: str) -> None:
    def moved(tensors: Tensors) -> None:
        tensors[BEHIND + name][2, 3] += 1e-3

    with pytest.raises(DataError, match=rf"share it, but {BEHIND}{name} differs from"):
        check(model, moved)


def test_a_model_saved_without_them_is_refused_with_what_to_do(model: Path) -> None:
    """As transformers saves it, whose models have none."""

    def without(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(BEHIND)]:
            del tensors[name]

    with pytest.raises(DataError, match="num_nextn_predict_layers=1 should be 0"):
        check(model, without)


def test_one_missing_tensor_of_theirs_is_named(model: Path) -> None:
    def without(tensors: Tensors) -> None:
        del tensors[BEHIND + "eh_proj.weight"]

    with pytest.raises(
        DataError, match=rf"1 fault\):\n  missing {BEHIND}eh_proj.weight \[32, 64\]"
    ):
        check(model, without)
