"""Conversion under a limit far below the model's size; and what a damaged checkpoint says."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.models.hf_io import open_checkpoint
from megarl.models.hf_write import write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from megarl.types import TensorSpec
from tests.helpers.export import export

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "eos_token_id": 1,
    "vocab_size": 19200,  # times hidden_size: the largest group; no rows of padding
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
LARGEST = 19200 * 1024 * 2
SMALL = 32 * 2**20  # what else a conversion needs, whatever the model


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    specs = mapping_for(read_spec(folder)).hf_spec()
    write_checkpoint(folder / "model", _values(specs), specs, folder, 100 * 2**20)
    total = sum(math.prod(spec.shape) * 2 for spec in specs)
    assert total > 2 * (LARGEST * 3 // 2 + SMALL)
    return folder / "model"


def _values(specs: list[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor another number, counting up along its rows."""
    for k, spec in enumerate(specs):
        tensor = torch.full(spec.shape, float(k % 256), dtype=torch.bfloat16)
        tensor[: spec.shape[0] // 2] += 1
        yield spec.name, tensor


def convert(what: str, source: Path, out: Path, allowed: int) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.checkpoint.limited", what, source, out, allowed]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


def test_memory_is_bounded_by_the_largest_group(large: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    allowed = LARGEST * 3 // 2 + SMALL
    assert convert("import", large, there, allowed) == (0, "")
    shutil.copyfile(large / "config.json", there / "config.json")
    assert convert("export", there, back, allowed) == (0, "")
    first, second = open_checkpoint(large), open_checkpoint(back)
    assert sorted(first.names()) == sorted(second.names())
    for name in first.names():
        assert torch.equal(first.get(name), second.get(name)), name
    code, said = convert("import", large, tmp_path / "less", LARGEST // 2)  # the limit holds
    assert code and "allocate memory" in said
    code, said = convert("export", there, tmp_path / "less too", LARGEST // 2)
    assert code and "allocate memory" in said and not (tmp_path / "less too").exists()
    for place in (100, (there / "__0_0.distcp").stat().st_size // 2):
        _damage(there, place, tmp_path / "damaged")


def _damage(there: Path, place: int, out: Path) -> None:
    """One byte of the checkpoint is another: in the first tensor's values, or in an expert's."""
    file = there / "__0_0.distcp"
    with file.open("r+b") as handle:
        handle.seek(5000 + place)
        before = handle.read(1)
        handle.seek(5000 + place)
        handle.write(bytes([before[0] ^ 1]))
        handle.flush()
        with pytest.raises(DataError, match=r"__0_0\.distcp: .* is damaged"):
            export(there, out, read_spec(there), there)
        assert not out.exists()
        handle.seek(5000 + place)
        handle.write(before)
