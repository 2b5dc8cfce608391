"""bf16: the logits reach the losses as they are, and become their own gradient."""

from pathlib import Path

import pytest
import torch

from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist


def test_a_bf16_step_has_the_gradient_of_fp32_log_probs(pool: WorkerPool, tiny_model: Path) -> None:
    samples = random_samples(6, 4, seed=3)
    ours, eager = (
        pool.run(
            "tests.actor.work_precision:step",
            world=1,
            hf=tiny_model,
            layout={},
            samples=samples,
            eager=eager,
        )[0]
        for eager in (False, True)
    )
    assert ours["dtypes"] == {torch.bfloat16}  # no copy of the logits in fp32 on the way
    for name, expected in eager["gradients"].items():
        # Both round the logits' gradient to bf16 once; where they round apart it is by 2^-8 of it.
        difference = (ours["gradients"][name].float() - expected.float()).norm()
        assert difference <= 2**-8 * expected.float().norm(), name
    assert any(g.norm() > 0 for g in eager["gradients"].values())
