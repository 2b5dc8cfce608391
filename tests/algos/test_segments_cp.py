"""A row cut over context-parallel ranks has the loss, gradient and metrics of the whole row.

What crosses the ranks is float64; a token's own float32 arithmetic may round differently
(an ulp of exp, 1.2e-7) where it lies in another vector lane. What these tests must catch is of
order one: without a reduction each rank would take its own tokens for the whole sequence.
"""

from typing import Any

import pytest
import torch

from megarl.algos.segments import Segments
from megarl.monitor.metrics import reduce_metrics
from megarl.ops import native_devices
from megarl.types import LossInputs
from tests.algos import ragged
from tests.algos.work_rows import COEFFICIENTS
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

TOL = 1e-6

GSPO = {"name": "gspo", "eps_low": 0.05, "eps_high": 0.05}
SAPO = {"name": "sapo"}
POLICIES = [
    GSPO,
    SAPO,
    {"name": "gspo_token", "eps_low": 0.05, "eps_high": 0.05},
    {"name": "gmpo", "eps_low": 0.2, "eps_high": 0.2},
    {"name": "ppo_clip", "dual_clip": 3.0},
]
BOUNDS = [0, 12, 16, 36, 44, 48]  # each segment cut into 4 chunks, rank 0 has first and last
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
    elif kind == "a NaN":
        mask[:] = True
    else:
        assert kind == "empty"
    return mask


KINDS = ["all ones", "holes", "a single token", "all on rank 0", "empty", "a NaN"]
CASES = [(settings, kind) for settings in POLICIES for kind in KINDS]
NAN_AT = 24  # in the middle chunks of the segment from 16 to 36: on rank 1


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
        "ref_logprobs": old + 0.5 * torch.randn(total, generator=random),
        "correction": 2 * torch.rand(total, generator=random),
    }
    values["rollout_logprobs"] += 0.1 * torch.randn(total, generator=random)
    if kind == "a NaN":
        values["logprobs"][NAN_AT] = float("nan")
    poisoned = {name: torch.where(mask, v, float("nan")) for name, v in values.items()}
    return {**poisoned, "mask": mask, "cu_seqlens": torch.tensor(BOUNDS, dtype=torch.int32)}


def on_one_rank(
    settings: dict[str, Any], row: dict[str, torch.Tensor], **terms: Any
) -> ragged.Evaluated:
    values = {k: v.clone() for k, v in row.items() if k != "cu_seqlens"}
    for name in ("logprobs", "entropy"):
        values[name].requires_grad_()
    return ragged.evaluate(settings, LossInputs(**values), Segments(row["cu_seqlens"]), **terms)


def assert_shares_add_up(
    parts: list[dict[str, Any]], expected: ragged.Evaluated, row: dict[str, torch.Tensor]
) -> None:
    loss = sum(float(part["loss"]) for part in parts)
    assert loss == pytest.approx(float(expected.loss), rel=TOL, abs=1e-8)
    grad = sum(part["grad"] for part in parts)
    torch.testing.assert_close(grad.double(), expected.flat_grad, rtol=TOL, atol=0)
    assert float(grad.norm()) == pytest.approx(float(expected.flat_grad.norm()), rel=TOL)
    assert (grad[~row["mask"]] == 0).all() and torch.isfinite(grad).all()
    assert bool((grad != 0).any()) == bool(row["mask"].any())
    found = reduce_metrics([part["metrics"] for part in parts])
    assert found == pytest.approx(reduce_metrics([expected.metrics]), rel=TOL, abs=1e-8)
    dropped = sorted(int(t) for part in parts for t in part["dropped"])
    flat = [d for segment in expected.dropped for d in segment]
    assert dropped == [t for t, d in enumerate(flat) if d]


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
    row = whole_row(kind)
    assert_shares_add_up(on_two_ranks[case], on_one_rank(settings, row), row)


def test_the_cases_are_what_they_say(on_two_ranks: list[list[dict[str, Any]]]) -> None:
    """Of "all on rank 0" the other rank has nothing of its own, and still takes part."""
    for case, (_, kind) in enumerate(CASES):
        parts = on_two_ranks[case]
        counts = [int(mask_of(kind)[part["index"]].sum()) for part in parts]
        if kind == "all on rank 0":
            assert counts == [len(ON_RANK_0), 0]
        elif kind == "a single token":
            assert sum(counts) == 1
        elif kind == "empty":
            assert counts == [0, 0]
            assert [float(part["loss"]) for part in parts] == [0.0, 0.0]
        else:
            assert min(counts) > 5
        if kind == "a NaN":
            assert [part["dropped"].tolist() for part in parts] == [[], [NAN_AT]]


def test_a_nan_on_one_rank_silences_a_sequence_objective_on_both(
    on_two_ranks: list[list[dict[str, Any]]],
) -> None:
    """The other rank cannot see it: what is left out is agreed on in the one all-reduce."""
    spoilt = range(16, 36)
    for case, (settings, kind) in enumerate(CASES):
        if kind == "a NaN":
            grad = sum(part["grad"] for part in on_two_ranks[case])
            zeros = (grad[list(spoilt)] == 0).sum()
            if settings["name"] in ("gspo", "gspo_token", "gmpo"):
                assert zeros == len(spoilt)
            else:
                assert grad[NAN_AT] == 0 and zeros < len(spoilt)


def test_divergence_entropy_and_masked_sequences_add_up_as_well(pool: WorkerPool) -> None:
    kinds = ("holes", "a NaN", "empty")
    cases = [(settings, whole_row(kind)) for settings in (GSPO, POLICIES[-1]) for kind in kinds]
    ranks = pool.run("tests.algos.work_rows:shares_of_all_terms", world=2, cases=cases)
    for k, (settings, row) in enumerate(cases):
        expected = on_one_rank(
            settings,
            row,
            kl={"type": "k3"},
            opsm={"delta": -0.2, "against": "rollout"},
            coefficients=COEFFICIENTS,
        )
        assert_shares_add_up([rank[k] for rank in ranks], expected, row)
        dropped = expected.value("policy/opsm_dropped")
        assert dropped is None or 0 < dropped < 1  # one of the sequences is switched off


def test_a_missing_reduction_would_be_seen(pool: WorkerPool) -> None:
    """Guards the tests above: without it GSPO is wrong by far more than their tolerance."""
    row = whole_row("all ones")
    parts = pool.run("tests.algos.work_rows:lonely_shares", world=2, cases=[(GSPO, row)])
    expected = on_one_rank(GSPO, row).flat_grad
    grad = sum(part[0]["grad"] for part in parts)
    assert float((grad - expected).abs().max() / expected.abs().max()) > 0.1


@pytest.mark.parametrize(
    ("settings", "count"),
    [(p, 2 if p["name"] == "gmpo" and not native_devices("policy_loss") else 1) for p in POLICIES],
    ids=lambda x: x["name"] if isinstance(x, dict) else None,
)
def test_one_all_reduce_of_sequence_sums_is_all_that_crosses_the_ranks(
    pool: WorkerPool, settings: dict[str, Any], count: int
) -> None:
    """Forward, backward and metrics together; gmpo clips before it sums, for which its torch
    form takes another."""
    case = (settings, whole_row("holes"))
    for events in pool.run("tests.algos.work_rows:collectives", world=2, case=case):
        assert events == ["gloo:all_reduce"] * count
