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
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec
from tests.helpers.families import save_model

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
