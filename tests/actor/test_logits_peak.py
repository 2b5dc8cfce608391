"""The logits are made once, in the model's precision, and become their own gradient: an fp32 tensor
of their size never exists, neither in training nor where log-probs are recorded.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import make_tiny_model
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

VOCAB, ROW = 50_000, 256


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dense model with a real vocabulary, whose logits dwarf all else."""
    sizes = ("--layers", "1", "--hidden", "32", "--heads", "2", "--head-dim", "16", "--ffn", "32")
    out = tmp_path_factory.mktemp("wide") / "model"
    make_tiny_model(out, *sizes, "--experts", "0", "--tie")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB}))
    tensors = load_file(out / "model.safetensors")
    embedding = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(0)) * 0.1
    save_file({**tensors, "model.embed_tokens.weight": embedding}, out / "model.safetensors")
    return out


def passes(pool: WorkerPool, hf: Path, layout: dict[str, int], copies: bool = False) -> list[Any]:
    samples = random_samples(4, 4, vocab=VOCAB, seed=6, longest=64)
    work = {"hf": hf, "layout": layout, "samples": samples, "row": ROW, "copies": copies}
    return pool.run("tests.actor.work_peak:allocations", world=layout.get("tp", 1), **work)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_fp32_tensor_has_the_size_of_the_logits(pool: WorkerPool, wide: Path, tp: int) -> None:
    for found in passes(pool, wide, {"tp": tp}):
        for name, memory in found.items():
            logits = memory["row"] * VOCAB // tp  # elements on a rank, but for padding
            assert memory["row"] > 150  # else something else would be as large
            assert memory["fp32"] < logits / 4, name
            # bf16 logits, once: 2 bytes each and 1% for the vocabulary's padding
            assert 0.98 * 2 * logits < memory["single"] < 1.02 * 2 * logits, name
            # and beside them what a step needs of everything else, not a second copy
            assert memory["peak"] < 1.8 * 2 * logits, name


def test_a_copy_in_fp32_would_be_seen(pool: WorkerPool, wide: Path) -> None:
    (found,) = passes(pool, wide, {}, copies=True)
    for memory in found.values():
        logits = memory["row"] * VOCAB
        assert memory["fp32"] > 0.98 * logits and memory["single"] > 0.98 * 4 * logits
