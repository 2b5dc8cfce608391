"""Conversion under a limit far below the model's size; and what a damaged checkpoint says."""

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.checkpoint.workers import Workers
from megarl.convert import Export, Import
from megarl.convert_display import show_mapping
from megarl.errors import DataError
from megarl.models.hf_io import open_checkpoint
from megarl.models.hf_write import write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from megarl.types import TensorSpec
from tests.checkpoint.sparse import DEEPSEEK_V3, QWEN3_235B, Config, sparse_folder

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


def convert(what: str, source: Path, out: Path, allowed: int, *more: object) -> tuple[int, str]:
    """``more``: threads, by default one, and ``holes``."""
    command = [sys.executable, "-m", "tests.checkpoint.limited", what, source, out, allowed]
    done = subprocess.run(
        [*map(str, command), *map(str, more or [1])],
        **{"capture_output": True, "text": True, "timeout": 600},
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # an arena takes addresses, not memory
    )
    return done.returncode, done.stderr


def test_memory_is_bounded_by_the_largest_group(large: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    allowed = LARGEST * 3 // 2 + SMALL
    assert convert("import", large, there, allowed) == (0, "")
    assert convert("export", there, back, allowed) == (0, "")
    first, second = open_checkpoint(large), open_checkpoint(back)
    assert sorted(first.names()) == sorted(second.names())
    for name in first.names():
        assert torch.equal(first.get(name), second.get(name)), name
    code, said = convert("import", large, tmp_path / "less", LARGEST // 2)  # the limit holds
    assert code and "allocate memory" in said
    code, said = convert("export", there, tmp_path / "less too", LARGEST // 2)
    assert code and "allocate memory" in said and not (tmp_path / "less too").exists()
    file = there / "megatron" / "__0_0.distcp"
    for place in (100, file.stat().st_size // 2):
        _damage(file, place, tmp_path / "damaged")


def _damage(file: Path, place: int, out: Path) -> None:
    """One byte of the checkpoint is another: in the first tensor's values, or in an expert's."""
    with file.open("r+b") as handle:
        handle.seek(5000 + place)
        before = handle.read(1)
        handle.seek(5000 + place)
        handle.write(bytes([before[0] ^ 1]))
        handle.flush()
        with pytest.raises(DataError, match=r"__0_0\.distcp: .* is damaged"):
            Export(file.parents[1]).run(out, Workers())
        assert not out.exists()
        handle.seek(5000 + place)
        handle.write(before)


# --- real models' shapes --------------------------------------------------------------------------

# Slices of their layers: one dense, where there are any, and one or two of experts.
SLICES: dict[str, tuple[Config, bool]] = {
    "qwen3-235b-a22b": ({**QWEN3_235B, "num_hidden_layers": 2}, False),
    "deepseek-v3 in fp8": (
        {
            **DEEPSEEK_V3,
            **{"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        },
        True,
    ),
}
THREADS = 2
ROOM = 512 * 2**20  # of places for small parameters, slabs, and what the allocator keeps


@pytest.mark.slow
@pytest.mark.parametrize("name", SLICES)
def test_real_layers_are_converted_under_a_limit_far_below_their_size(
    tmp_path: Path, name: str
) -> None:
    config, fp8 = SLICES[name]
    hf, there, back = (tmp_path / x for x in ("hf", "there", "back"))
    num_bytes = sparse_folder(hf, config, fp8=fp8)
    allowed = config["vocab_size"] * config["hidden_size"] * 2 * 3 // 2 + ROOM
    whole = Import(hf).num_bytes
    assert whole > 5 * allowed and num_bytes > 3 * allowed
    assert convert("import", hf, there, allowed, THREADS, "holes") == (0, "")
    stored = sum(f.stat().st_size for f in (there / "megatron").glob("*.distcp"))
    assert stored > whole
    assert convert("export", there, back, allowed, THREADS, "holes") == (0, "")
    assert sum(f.stat().st_size for f in back.glob("*.safetensors")) > whole
    first, second = open_checkpoint(hf), open_checkpoint(back)
    assert sorted(first.names()) == sorted(second.names())
    assert all(first.shape(n) == second.shape(n) for n in first.names())


PUBLISHED = {  # values without rows of padding, of which both have none; bytes of the files' values
    "qwen3-235b-a22b": (QWEN3_235B, False, 235_093_634_560, 470_187_269_120),
    "deepseek-v3 in fp8": (DEEPSEEK_V3, True, 671_026_419_200, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_whole_model_is_looked_at_by_its_headers(tmp_path: Path, name: str) -> None:
    """Every header of files as large as the published ones, in little memory."""
    config, fp8, values, size = PUBLISHED[name]
    config = {**config, **({"num_nextn_predict_layers": 0} if fp8 else {})}
    num_bytes = sparse_folder(tmp_path / "hf", config, fp8=fp8)
    assert size is None or size < num_bytes < size + 10 * 2**20  # headers
    conversion, out = Import(tmp_path / "hf"), io.StringIO()
    show_mapping(conversion.mapping, 8, out)
    assert f"\n{values:,} values in " in out.getvalue()
