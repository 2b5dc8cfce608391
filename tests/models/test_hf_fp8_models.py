"""Models in FP8 blocks: as what their values are, and copied without FP8."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import DataError
from megarl.models.hf_complete import check_complete, open_model
from megarl.models.hf_io import HfCheckpoint, open_checkpoint
from megarl.models.hf_write import write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from tests.helpers.fp8_blocks import BLOCKS, edit_config, quantised

Tensors = dict[str, Tensor]
SOME = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize("model", ["moe", "deepseek_v3", "glm4_moe"])
def test_a_model_in_fp8_is_its_values(
    saved: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    folder, values = quantised(saved(model), tmp_path / "m")
    spec = read_spec(folder)
    assert not read_spec(saved(model)).differences(spec)
    checkpoint = open_model(folder, spec)
    check_complete(checkpoint, spec)
    mapping = mapping_for(spec)
    for name in mapping.megatron_names():
        hf = [checkpoint.get(n) for n in mapping.hf_names(name)]
        plain = [values[n] for n in mapping.hf_names(name)]
        assert torch.equal(mapping.to_megatron(name, hf), mapping.to_megatron(name, plain))


def test_a_copy_of_its_values_says_nothing_of_fp8(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, values = quantised(saved("moe"), tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    specs = mapping_for(read_spec(folder)).hf_spec()
    write_checkpoint(tmp_path / "out", each(checkpoint), specs, folder)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    copy = open_model(tmp_path / "out", read_spec(tmp_path / "out"))
    assert all(torch.equal(copy.get(n), values[n]) for n in copy.names())
    assert set(copy.names()) == set(values)


def each(checkpoint: HfCheckpoint) -> Iterator[tuple[str, Tensor]]:
    return ((name, checkpoint.get(name)) for name in checkpoint.names())


def test_missing_scales_are_named_with_the_rest(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, _ = quantised(saved("moe"), tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{SOME}_scale_inv"], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DataError) as error:
        open_model(folder, read_spec(folder))
    message = str(error.value)
    assert "(2 faults)" in message
    assert f"missing {SOME}_scale_inv [2, 1], of F8_E4M3 {SOME}" in message
    assert "missing model.norm.weight [32]" in message


def test_gpt_oss_is_not_read_from_fp8(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("gpt_oss"), tmp_path / "m")
    edit_config(folder, quantization_config=BLOCKS)
    with pytest.raises(DataError, match=r"quantization_config.quant_method: found 'fp8'"):
        read_spec(folder)
