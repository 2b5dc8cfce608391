"""A row cut over context-parallel ranks has the loss, gradient and metrics of the whole row.

What crosses the ranks is float64; a token's own float32 arithmetic may round differently
(an ulp of exp, 1.2e-7) where it lies in another vector lane. What these tests must catch is of
order one: a reduction missing in the backward pass leaves each rank with its own share of the
gradient.
"""

from typing import Any

import pytest
import torch

from megarl.algos.segments import Segments
from megarl.monitor.metrics import reduce_metrics
from megarl.types import LossInputs
from tests.algos import ragged
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

TOL = 1e-6

GSPO = {"name": "gspo", "eps_low": 0.05, "eps_high": 0.05}
SAPO = {"name": "sapo"}
BOUNDS = [
    0,
    12,
    16,
    36,
    44,
    48,
]  # each segment cut into 4 chunks, rank 0 has first and last
ON_RANK_0 = [0, 1, 2, 9, 10, 11, 12, 15, 16, 17, 18, 19, 20, 31, 35]


def mask_of(kind: str) -> torch.Tensor:
    mask = torch.zeros(BOUNDS[-1], dtype=torch.bool)
    if kind == "all ones":
        mask[:] = True
    elif kind == "holes":
        mask[torch.rand(len(mask), generator=torch.Generator().manual_seed(1)) < 0.6] = True
    elif kind == "a single token":
        mask[25] = True  # A < 0 and r > 1: inside the trust region
    elif kind == "all on rank 0":
        mask[ON_RANK_0] = True
    else:
        assert kind == "empty"
    return mask


KINDS = ["all ones", "holes", "a single token", "all on rank 0", "empty"]
CASES = [(settings, kind) for settings in (GSPO, SAPO) for kind in KINDS]


def whole_row(kind: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    total, mask = BOUNDS[-1], mask_of(kind)
    old = -2 * torch.rand(total, generator=random)
    values = {
        "logprobs": old + 0.3 * torch.randn(total, generator=random),
        "entropy": torch.rand(total, generator=random),
        "old_logprobs": old,
        "rollout_logprobs": old.clone(),
        "advantages": torch.randn(total, generator=random),
        "weight": torch.rand(total, generator=random) / total,
    }
    poisoned = {name: torch.where(mask, v, float("nan")) for name, v in values.items()}
    return {**poisoned, "mask": mask, "cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)}


def on_one_rank(settings: dict[str, Any], row: dict[str, torch.Tensor]) -> ragged.Evaluated:
    values = {k: v.clone() for k, v in row.items() if k != "cu_seqlens"}
    values["logprobs"].requires_grad_()
    return ragged.evaluate(settings, LossInputs(**values), Segments(row["cu_seqlens"]))


@pytest.fixture(scope="module")
def on_two_ranks(pool: WorkerPool) -> list[list[dict[str, Any]]]:
    """Results of the two ranks for every case."""
    cases = [(settings, whole_row(kind)) for settings, kind in CASES]
    ranks = pool.run("tests.algos.work_rows:shares", world=2, cases=cases)
    return [list(pair) for pair in zip(*ranks, strict=True)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{p['name']} {k}" for p, k in CASES])
def test_two_context_parallel_ranks_equal_one(
    on_two_ranks: list[list[dict[str, Any]]], case: int
) -> None:
    settings, kind = CASES[case]
    parts, row = on_two_ranks[case], whole_row(kind)
    expected = on_one_rank(settings, row)
    loss = sum(float(part["loss"]) for part in parts)
    assert loss == pytest.approx(float(expected.loss), rel=TOL, abs=1e-8)
    grad = sum(part["grad"] for part in parts)
    flat = torch.tensor([g for segment in expected.grad for g in segment])
    torch.testing.assert_close(grad, flat, rtol=TOL, atol=0)
    assert (grad[~row["mask"]] == 0).all()
    assert bool((grad != 0).any()) == bool(row["mask"].any())
    found = reduce_metrics([part["metrics"] for part in parts])
    assert found == pytest.approx(reduce_metrics([expected.metrics]), rel=TOL, abs=1e-8)


def test_the_cases_are_what_they_say(on_two_ranks: list[list[dict[str, Any]]]) -> None:
    """Of "all on rank 0" the other rank has nothing of its own, and still takes part."""
    for case, (_, kind) in enumerate(CASES):
        counts = [int(mask_of(kind)[part["index"]].sum()) for part in on_two_ranks[case]]
        if kind == "all on rank 0":
            assert counts == [len(ON_RANK_0), 0]
        elif kind == "a single token":
            assert sum(counts) == 1
        elif kind == "empty":
            assert counts == [0, 0]
            assert [float(part["loss"]) for part in on_two_ranks[case]] == [0.0, 0.0]
        else:
            assert min(counts) > 5


def test_a_missing_reduction_would_be_seen(pool: WorkerPool) -> None:
    """Guards the tests above: without it GSPO is wrong by far more than their tolerance."""
    row = whole_row("all ones")
    parts = pool.run("tests.algos.work_rows:lonely_shares", world=2, cases=[(GSPO, row)])
    expected = on_one_rank(GSPO, row)
    flat = torch.tensor([g for segment in expected.grad for g in segment])
    grad = sum(part[0]["grad"] for part in parts)
    assert float((grad - flat).abs().max() / flat.abs().max()) > 0.1
