"""Folders whose experts are fused, as transformers writes them itself: the same tensors as in the
other spelling, bit for bit, each read alone.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import DataError
from megarl.models.hf_complete import check_complete, open_model
from megarl.models.hf_fp8 import SCALE
from megarl.models.hf_headers import weight_map
from megarl.models.hf_io import open_checkpoint
from megarl.models.hf_write import HfWriter
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from tests.helpers.families import save_model
from tests.helpers.fp8_blocks import quantised

FAMILIES = ("qwen3_moe yarn", "qwen3_moe tied", "deepseek_v3 direct queries", "kimi_k2", "glm4_moe")
Folders = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """(a matrix for each expert, the same model fused)"""
    return {name: _both(name, tmp_path_factory.mktemp("fused")) for name in FAMILIES}


def _both(name: str, folder: Path) -> tuple[Path, Path]:
    from transformers import AutoModelForCausalLM

    plain, fused = folder / "plain", folder / "fused"
    save_model(name, plain, torch.bfloat16, num_nextn_predict_layers=0)
    config = json.loads((plain / "config.json").read_text())
    model_type = config["model_type"]
    if model_type == "kimi_k2":  # which transformers knows by another name
        (plain / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    model.save_pretrained(fused, save_original_format=False)
    for out in (plain, fused):
        (out / "config.json").write_text(json.dumps(config))
    return plain, fused


@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_are_the_same_tensors(folders: Folders, name: str) -> None:
    plain, fused = folders[name]
    raw = load_file(fused / "model.safetensors")
    assert any(n.endswith("mlp.experts.gate_up_proj") for n in raw)
    assert not any(".experts.0." in n for n in raw)
    first, second = (open_model(f, read_spec(f)) for f in (plain, fused))
    check_complete(second, read_spec(fused))
    assert sorted(first.names()) == sorted(second.names())
    for tensor in first.names():
        assert first.dtype(tensor) == second.dtype(tensor)
        assert torch.equal(first.get(tensor), second.get(tensor)), tensor
    rows = first.get("model.layers.2.mlp.experts.3.up_proj.weight")[2:5]
    assert torch.equal(second.get("model.layers.2.mlp.experts.3.up_proj.weight", rows=(2, 5)), rows)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((7, 24, 32), "missing model.layers.2.mlp.experts.7.gate_proj.weight"),
        ((9, 24, 32), "not part of the model: model.layers.2.mlp.experts.8.gate_proj.weight"),
        ((8, 26, 32), r"layers.2.mlp.experts.0.gate_proj.weight: found \[13, 32\]"),
        ((8, 25, 32), "not part of the model: model.layers.2.mlp.experts.gate_up_proj"),
        ((8 * 24, 32), "not part of the model: model.layers.2.mlp.experts.gate_up_proj"),
    ],
)
def test_fused_experts_of_another_size_are_refused(
    folders: Folders, tmp_path: Path, shape: tuple[int, ...], says: str
) -> None:
    _, fused = folders["qwen3_moe yarn"]
    tensors = load_file(fused / "model.safetensors")
    tensors["model.layers.2.mlp.experts.gate_up_proj"] = torch.zeros(shape, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((fused / "config.json").read_bytes())
    with pytest.raises(DataError, match=says):
        check_complete(open_checkpoint(tmp_path), read_spec(tmp_path))


# ---- FP8, and files ------------------------------------------------------------------------------


def fuse(folder: Path, out: Path) -> Path:
    """The same model, codes and scales of experts stacked as transformers stacks matrices."""
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for layer in sorted({n.partition(".experts.")[0] for n in tensors if ".experts." in n}):
        for suffix in ("", SCALE):
            for fused, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
                names = [
                    [f"{layer}.experts.{e}.{part}_proj.weight{suffix}" for part in parts]
                    for e in range(8)
                ]
                whole = torch.stack([torch.cat([tensors.pop(n) for n in own]) for own in names])
                tensors[f"{layer}.experts.{fused}_proj{suffix}"] = whole
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    return out


def test_fused_experts_in_fp8_are_the_values_of_separate_ones(
    folders: Folders, tmp_path: Path
) -> None:
    folder, _ = quantised(folders["qwen3_moe yarn"][0], tmp_path / "plain", (10, 24))
    first, second = (
        open_model(f, read_spec(f)) for f in (folder, fuse(folder, tmp_path / "fused"))
    )
    assert sorted(first.names()) == sorted(second.names())
    for tensor in first.names():
        assert torch.equal(first.get(tensor), second.get(tensor)), tensor
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert torch.equal(second.get(name, rows=(7, 13)), first.get(name)[7:13])


def test_blocks_that_hold_rows_of_gate_and_up_are_refused(folders: Folders, tmp_path: Path) -> None:
    folder, _ = quantised(folders["qwen3_moe yarn"][0], tmp_path / "plain", (10, 24))
    fused = fuse(folder, tmp_path / "fused")
    tensors = load_file(fused / "model.safetensors")
    for name in [n for n in tensors if n.endswith(SCALE)]:  # of blocks of 16 rows: 20 are none
        rows, columns = tensors[name.removesuffix(SCALE)].shape[-2:]
        stack = tensors[name].shape[:-2]
        tensors[name] = torch.ones(*stack, -(-rows // 16), -(-columns // 24))
    save_file(tensors, fused / "model.safetensors", metadata={"format": "pt"})
    text = (fused / "config.json").read_text()
    config = json.loads(text)
    config["quantization_config"]["weight_block_size"] = [16, 24]
    (fused / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError) as error:
        open_model(fused, read_spec(fused))
    said = str(error.value)
    assert "model.layers.2.mlp.experts.gate_up_proj [8, 40, 32]: blocks of 16 rows" in said
    assert "down_proj" not in said


def test_experts_go_into_the_file_that_held_them_fused(folders: Folders, tmp_path: Path) -> None:
    _, fused = folders["qwen3_moe yarn"]
    files = {n: "b.safetensors" if ".experts." in n else "a.safetensors" for n in weight_map(fused)}
    specs = mapping_for(read_spec(fused)).hf_spec()
    given = HfWriter(tmp_path, specs, files=files).weight_map()
    assert {n for n, file in given.items() if file == "b.safetensors"} == {
        spec.name for spec in specs if ".experts." in spec.name
    }


def test_a_shard_of_fused_experts_that_cannot_be_read_is_one_fault(
    folders: Folders, tmp_path: Path
) -> None:
    _, fused = folders["qwen3_moe yarn"]
    tensors = load_file(fused / "model.safetensors")
    index = {n: "b.safetensors" if ".experts." in n else "a.safetensors" for n in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        own = {n: t for n, t in tensors.items() if index[n] == file}
        save_file(own, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_bytes((fused / "config.json").read_bytes())
    open_model(tmp_path, read_spec(tmp_path))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(DataError, match=r"1 fault\b") as error:
        open_model(tmp_path, read_spec(tmp_path))
    assert "b.safetensors is missing" in str(error.value)
