"""Every family there and back, as a user would: the same tensors, and transformers loads what comes
back and computes the same bits.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.checkpoint.workers import Workers
from megarl.convert import Export, Import
from tests.helpers.families import MODELS, reference_logprobs, save_model
from tests.helpers.samples import random_samples


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_bits_with_what_comes_back(
    tmp_path: Path, name: str
) -> None:
    hf, there, back = tmp_path / "hf", tmp_path / "there", tmp_path / "back"
    save_model(name, hf)
    Import(hf).run(there, Workers(threads=2))
    Export(there).run(back, Workers(threads=2))
    first, second = (load_file(f / "model.safetensors") for f in (hf, back))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)
    samples = random_samples(2, 1, seed=4)
    ours, theirs = reference_logprobs(back, samples), reference_logprobs(hf, samples)
    assert all(len(one) and torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
