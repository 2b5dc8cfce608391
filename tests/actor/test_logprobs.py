"""Log-probs: equal to transformers' on the same weights, exact derivatives, and no leak between
packed sequences.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.types import Sample
from tests.actor.compare import mesh_of
from tests.conftest import make_tiny_model
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist


def run(
    pool: WorkerPool, hf: Path, samples: list[Sample], layout: dict[str, int]
) -> dict[int, Any]:
    world = mesh_of(layout).world_size
    results = pool.run(
        "tests.actor.work:logprobs", world=world, hf=hf, layout=layout, samples=samples
    )
    return {i: v for part in results for i, v in part.items()}


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}], ids=str)
def test_log_probs_equal_transformers(
    pool: WorkerPool, tiny_model: Path, layout: dict[str, int]
) -> None:
    from transformers import AutoModelForCausalLM

    samples = random_samples(6, 4, seed=5)
    found = run(pool, tiny_model, samples, layout)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    assert sorted(found) == list(range(len(samples)))
    for i, sample in enumerate(samples):
        ids = torch.from_numpy(sample.tokens).long()[None]
        with torch.no_grad():
            logits = reference(ids).logits[0, :-1].double()
        expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert expected.std() > 0.1  # not a uniform distribution, where any model would agree
        torch.testing.assert_close(found[i].double(), expected, rtol=0, atol=1e-5)


def test_a_token_of_one_sequence_changes_no_bit_of_the_others(
    pool: WorkerPool, tmp_path: Path
) -> None:
    dense = make_tiny_model(tmp_path / "dense", "--experts", "0", "--init-std", "0.1")
    before, after, victim = with_a_token_changed(pool, dense)
    assert not torch.equal(before[victim], after[victim])
    for i in set(before) - {victim}:
        assert torch.equal(before[i], after[i]), i


def test_with_experts_it_changes_their_rounding_only(pool: WorkerPool, tiny_model: Path) -> None:
    """Another number of tokens at an expert may be another order of sums in its products."""
    before, after, victim = with_a_token_changed(pool, tiny_model)
    assert (before[victim] - after[victim]).abs().max() > 1e-2
    for i in set(before) - {victim}:
        assert (before[i] - after[i]).abs().max() < 1e-5, i


def with_a_token_changed(pool: WorkerPool, hf: Path) -> tuple[dict[int, Any], dict[int, Any], int]:
    """Log-probs of packed samples before and after one token of sample 5 has changed."""
    samples, victim = random_samples(4, 4, seed=9), 5
    before = run(pool, hf, samples, {})
    tokens = samples[victim].tokens.copy()
    tokens[1] = tokens[1] % 23 + 1
    samples[victim] = Sample(**{**vars(samples[victim]), "tokens": tokens})
    return before, run(pool, hf, samples, {}), victim


@pytest.mark.parametrize("world", [1, 2])
def test_derivatives_of_log_prob_and_entropy(pool: WorkerPool, world: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (5, 16))
    logits[1, 3] = 60.0  # a row that is nearly certain: p -> 0 elsewhere
    targets = [0, 3, 9, 11, 2]
    vocab, temperature = 13, 0.625
    results = pool.run(
        "tests.actor.work:logprob_gradients",
        world=world,
        logits=logits.tolist(),
        targets=targets,
        vocab=vocab,
        temperature=temperature,
    )
    z = torch.tensor(logits[:, :vocab], requires_grad=True)
    logp = (z / temperature).log_softmax(-1)
    lp = logp.gather(1, torch.tensor(targets)[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (
        lp @ torch.arange(1.0, 6.0).double() + entropy @ torch.tensor([0.5, -1, 2, 0, 1]).double()
    ).backward()
    grad = torch.cat([r["grad"] for r in results], dim=1).double()
    for r in results:
        torch.testing.assert_close(r["lp"].double(), lp.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(r["entropy"].double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad[:, :vocab], z.grad, rtol=1e-5, atol=1e-5)
    assert (grad[:, vocab:] == 0).all()  # padding columns are no part of the vocabulary
