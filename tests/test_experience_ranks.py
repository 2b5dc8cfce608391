"""A plan completed by several ranks is that of one rank, token for token.

Statistics of the whole batch are put together from the ranks' parts: in another order, so float64
sums differ by rounding, and what is stored is float32 (6e-8). Selections and drops are decisions
and must be the same ones.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megarl.experience import Ranks, trained_samples
from megarl.mesh import Mesh
from megarl.monitor.metrics import reduce_metrics
from megarl.types import PackedBatch, Sample
from tests.helpers.plans import Completed, complete, completed, config_of
from tests.helpers.ranks import Gather, on_ranks
from tests.helpers.rich import rich_numbers, rich_samples, set_passes

SAMPLES = rich_samples(seed=1)
NUMBERS = rich_numbers(SAMPLES, seed=1, entropy=0.2)
FIELDS = ("advantages", "weight", "correction", "selected", "returns")
CLOSE = 3e-7

ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {
        "policy": {"name": "ppo_clip"},
        "advantage": {"name": "gae", "gamma": 0.99, "lam": 0.95, "bootstrap_truncated": True},
        "aggregation": {"name": "token_mean", "denominator_mask": "kept"},
        "kl": {"type": "k1", "coef": 0.1, "place": "reward"},
        "correction": {"level": "sequence", "mode": "mask", "high": 3.0, "batch_normalize": True},
        "value": {},
    },
    "reinforce++ with kl-cov": {
        "policy": {"name": "kl_cov", "ratio": 0.05},
        "advantage": {"name": "reinforce_pp", "gamma": 0.9},
        "aggregation": {"name": "seq_mean_token_mean", "denominator_mask": "kept"},
        "correction": {"level": "token", "high": 2.0, "k2_filter": 1.0, "batch_normalize": True},
        "entropy": {"name": "adaptive", "c0": 0.1},
    },
    "aspo in two steps": {
        "policy": {"name": "aspo", "entropy_quantile": 0.8},
        "advantage": {"name": "grpo", "scale": "batch", "truncated_variant": "exclude"},
        "aggregation": {"name": "group_token_mean"},
        "kl": {"type": "k3", "coef": 0.1, "adaptive": {"target": 0.5, "horizon": 100}},
        "correction": {"level": "geometric", "low": 0.5, "high": 2.0, "veto": 1e-3},
        "overlong": {"l_max": 12, "l_cache": 8},
        "minibatches": 2,
    },
    "baseline whitened, three steps": {
        "policy": {"name": "kl_cov", "ratio": 0.1},
        "advantage": {"name": "reinforce_pp_baseline"},
        "aggregation": {"name": "seq_mean_token_sum", "seq_denominator": "all"},
        "correction": {"k3_filter": 0.1, "batch_normalize": True},
        "overlong_filter": True,
        "minibatches": 3,
    },
    "steps": {"policy": {"name": "gspo"}, "advantage": {"name": "grpo_process"}},
    "components": {"policy": {"name": "gspo"}, "advantage": {"name": "gdpo"}},
}
each_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
SPLITS = [(Mesh(dp=2), 96), (Mesh(dp=3), 4096), (Mesh(dp=4), 32), (Mesh(cp=2, dp=2), 64)]


def config(name: str, row_tokens: int) -> Any:
    return config_of(algo=ALGORITHMS[name], train={"row_tokens": row_tokens})


def samples_of(name: str) -> list[Sample]:
    return trained_samples(SAMPLES, config(name, 4096).algo)


def passes(row: PackedBatch) -> None:
    set_passes(row, NUMBERS, recompute=True)


def by_sample(rows: Sequence[PackedBatch]) -> dict[str, dict[int, list[float]]]:
    """Field -> sample -> numbers of its tokens."""
    found: dict[str, dict[int, list[float]]] = {name: {} for name in FIELDS}
    for row in rows:
        for i, start, length in row.segments():
            here = slice(start, start + length)
            for name in FIELDS:
                if (values := getattr(row, name)) is not None:
                    used = row.mask[here]
                    found[name][i] = torch.where(used, values[here].double(), 0.0).tolist()
    return found


def everything(ranks: Sequence[Completed]) -> dict[str, dict[int, list[float]]]:
    return by_sample([row for r in ranks for rows in r.plan.steps for row in rows])


def assert_same(ranks: Sequence[Completed], alone: Completed) -> None:
    found, expected = everything(ranks), everything([alone])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].keys() == values.keys(), name
        for i, row in values.items():
            if name == "selected":
                assert found[name][i] == row
            else:
                np.testing.assert_allclose(found[name][i], row, rtol=CLOSE, atol=1e-9, err_msg=name)
    for rank in ranks:
        assert rank.plan.coefficients == ranks[0].plan.coefficients
        assert vars(rank.plan.coefficients) == pytest.approx(vars(alone.plan.coefficients))
        assert rank.controllers.state() == ranks[0].controllers.state()
        assert rank.plan.trained_tokens == alone.plan.trained_tokens
        one, two = reduce_metrics([rank.metrics]), reduce_metrics([alone.metrics])
        assert one == pytest.approx(two, rel=1e-9, abs=1e-12)


@each_algorithm
@pytest.mark.parametrize(("mesh", "row_tokens"), SPLITS, ids=str)
def test_ranks_complete_the_plan_of_one_rank(name: str, mesh: Mesh, row_tokens: int) -> None:
    (alone,) = completed(samples_of(name), config(name, 4096), Mesh(), passes)
    assert_same(completed(samples_of(name), config(name, row_tokens), mesh, passes), alone)


@each_algorithm
def test_the_algorithms_above_have_something_to_decide(name: str) -> None:
    (alone,) = completed(samples_of(name), config(name, 4096), Mesh(), passes)
    found = everything([alone])
    for field in FIELDS:
        values = [x for row in found[field].values() for x in row]
        assert not values or (min(values) != max(values))
    settings = ALGORITHMS[name]
    assert bool(found["correction"]) == ("correction" in settings)
    assert bool(found["selected"]) == (settings["policy"]["name"] in ("kl_cov", "aspo"))
    assert bool(found["returns"]) == (settings.get("advantage", {}).get("name") == "gae")


@each_algorithm
def test_ranks_without_losses_and_ranks_with_the_same_rows_take_part(name: str) -> None:
    """Two data-parallel ranks of two pipeline stages with two tensor-parallel ranks each: the first
    stage holds no losses, of the last one the second rank says what the first one does.
    """
    mesh = Mesh(tp=2, pp=2, dp=2)

    def rank(dp: int, holds: bool, speaks: bool, gather: Gather) -> Completed:
        ranks = Ranks(gather, holds=holds, speaks=speaks)
        return complete(samples_of(name), config(name, 96), mesh, dp, passes, ranks)

    places = [
        (dp, last, last and first) for last in (False, True) for dp in (0, 1) for first in (1, 0)
    ]
    found = on_ranks([partial(rank, dp, holds, bool(speaks)) for dp, holds, speaks in places])
    (alone,) = completed(samples_of(name), config(name, 4096), Mesh(), passes)
    speaking = [r for r, (_, _, speaks) in zip(found, places, strict=True) if speaks]
    assert_same(speaking, alone)
    for one, (dp, holds, _) in zip(found, places, strict=True):
        assert one.plan.coefficients == speaking[0].plan.coefficients
        assert one.controllers.state() == speaking[0].controllers.state()
        assert one.metrics == speaking[0].metrics
        if holds:
            assert everything([one]) == everything([speaking[dp]])


@each_algorithm
def test_the_order_of_the_samples_decides_nothing(name: str) -> None:
    if ALGORITHMS[name].get("minibatches", 1) > 1:
        pytest.skip("which groups share an optimizer step depends on the order")
    order = np.random.default_rng(0).permutation(len(SAMPLES))
    samples = samples_of(name)
    moved = [samples[i] for i in order]

    def of_moved(row: PackedBatch) -> None:
        set_passes(row, [NUMBERS[i] for i in order], recompute=True)

    (alone,) = completed(samples, config(name, 4096), Mesh(), passes)
    (other,) = completed(moved, config(name, 4096), Mesh(), of_moved)
    expected, found = everything([alone]), everything([other])
    for field, values in found.items():
        for k, row in values.items():
            np.testing.assert_allclose(row, expected[field][order[k]], rtol=CLOSE, atol=1e-9)
