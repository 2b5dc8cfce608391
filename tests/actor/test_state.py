"""An actor that is saved and loaded goes on as if nothing had happened, in whatever layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

LR = 1e-3
SAVE_AT, UNTIL = 2, 3
OPTIM = {"lr": LR, "distributed": True}

# Layouts sum in another order. Adam divides by the gradient's own size, so that one that is all
# rounding noise still moves its weight; hence a bound on the mean, and a loose one on the largest.
MEAN_TOL, MAX_TOL = LR * 2e-3, LR * 0.5


def ranks_of(pool: WorkerPool, work: str, layout: dict[str, int], **arguments: Any) -> list[Any]:
    world = mesh_of(layout).world_size
    return pool.run(f"tests.actor.work_state:{work}", world=world, layout=layout, **arguments)


def go(pool: WorkerPool, work: str, layout: dict[str, int], **arguments: Any) -> dict[str, Any]:
    """One result from those of all ranks."""
    ranks = ranks_of(pool, work, layout, save_at=SAVE_AT, until=UNTIL, **arguments)
    assert all(r["lrs"] == ranks[0]["lrs"] for r in ranks)
    whole = {k: {n: t for r in ranks for n, t in r[k].items()} for k in ("before", "after")}
    return {**whole, "lrs": ranks[0]["lrs"]}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(found[name], tensor), name


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, float]:
    """(largest mean difference of a tensor, largest difference)."""
    assert a.keys() == b.keys()
    gaps = [(a[n].double() - b[n].double()).abs() for n in a]
    return max(float(g.mean()) for g in gaps), max(float(g.max()) for g in gaps)


@pytest.fixture(scope="module")
def saved_run(pool: WorkerPool, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(an uninterrupted run, the checkpoint it left on its way), once for the same arguments."""
    runs: dict[str, tuple[dict[str, Any], Path]] = {}

    def run(layout: dict[str, int], sections: dict[str, Any]) -> tuple[dict[str, Any], Path]:
        key = f"{layout} {sections}"
        if key not in runs:
            path = tmp_path_factory.mktemp("run") / "saved"
            found = go(pool, "trained_on", layout, hf=tiny_model, path=path, **sections)
            runs[key] = found, path
        return runs[key]

    return run


PLAIN = {"optim": OPTIM}
WHOLE_OPTIMIZER = ({}, {"optim": {**OPTIM, "distributed": False}})
SAME = [
    ({}, PLAIN),
    ({}, {"optim": OPTIM, "precision": {"dtype": "bf16"}}),
    ({"dp": 2, "ep": 2}, PLAIN),
    ({"pp": 2}, PLAIN),
    ({"pp": 2, "vpp": 2}, PLAIN),
    WHOLE_OPTIMIZER,
]


@pytest.mark.parametrize(("layout", "sections"), SAME, ids=str)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    pool: WorkerPool,
    tiny_model: Path,
    saved_run: Any,
    layout: dict[str, int],
    sections: dict[str, Any],
) -> None:
    whole, path = saved_run(layout, sections)
    rest = go(pool, "resumed", layout, hf=tiny_model, path=path, **sections)
    assert_same_bits(rest["before"], whole["before"])
    assert_same_bits(rest["after"], whole["after"])
    assert distance(whole["before"], whole["after"])[0] > LR / 10  # the step did something


def test_the_learning_rate_goes_on_where_it_was(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    """Saved inside the warm-up; of 100 steps the last 96 fall."""
    optim = {**OPTIM, "warmup_steps": 4, "decay_fraction": 0.96, "min_lr_ratio": 0.1}
    arguments = {"hf": tiny_model, "path": tmp_path / "saved", "optim": optim}
    arguments |= {"save_at": 2, "until": 6}
    (whole,) = ranks_of(pool, "trained_on", {}, **arguments)
    (rest,) = ranks_of(pool, "resumed", {}, **arguments)
    assert rest["lrs"] == whole["lrs"]
    falling = [LR * (1 - 0.9 * k / 96) for k in (1, 2)]
    assert whole["lrs"] == pytest.approx([LR * 3 / 4, LR, *falling], rel=1e-9)


CHANGES = [
    ({}, {"dp": 2, "ep": 2}),
    ({"tp": 2}, {}),
    ({"dp": 2, "ep": 2}, {"tp": 2}),
    ({}, {"pp": 2, "vpp": 2}),
    ({}, {"pp": 2, "first_layers": 1}),
    ({"pp": 2, "vpp": 2}, {}),
    ({"pp": 2, "vpp": 2}, {"pp": 2}),
]


@pytest.mark.parametrize(("saved", "loaded"), CHANGES, ids=str)
def test_training_goes_on_in_another_layout(
    pool: WorkerPool, tiny_model: Path, saved_run: Any, saved: dict, loaded: dict
) -> None:
    whole, path = saved_run(saved, PLAIN)
    rest = go(pool, "resumed", loaded, hf=tiny_model, path=path, **PLAIN)
    assert_same_bits(rest["before"], whole["before"])
    mean, largest = distance(rest["after"], whole["after"])
    assert mean < MEAN_TOL and largest < MAX_TOL, (mean, largest)


@pytest.mark.parametrize("layout", [{"pp": 2, "vpp": 2}], ids=str)
def test_a_checkpoint_that_passed_through_another_layout_lost_no_bit(
    pool: WorkerPool, tiny_model: Path, saved_run: Any, tmp_path: Path, layout: dict
) -> None:
    """Weights and moments: the layout that saved it first trains on as if it had its own."""
    whole, path = saved_run({}, PLAIN)
    ranks_of(pool, "passed_on", layout, hf=tiny_model, path=path, out=tmp_path / "out", **PLAIN)
    rest = go(pool, "resumed", {}, hf=tiny_model, path=tmp_path / "out", **PLAIN)
    assert_same_bits(rest["before"], whole["before"])
    assert_same_bits(rest["after"], whole["after"])


def test_lost_moments_would_be_seen(pool: WorkerPool, tiny_model: Path, saved_run: Any) -> None:
    """Guards the test above: steps from zero moments differ by far more than its tolerance."""
    whole, path = saved_run({}, PLAIN)
    rest = go(pool, "resumed_without_moments", {}, hf=tiny_model, path=path, **PLAIN)
    mean, largest = distance(rest["after"], whole["after"])
    assert mean > 20 * MEAN_TOL and largest > 2 * MAX_TOL, (mean, largest)


def test_weights_alone_load_from_a_checkpoint_of_any_layout(
    pool: WorkerPool, tiny_model: Path, saved_run: Any, tmp_path: Path
) -> None:
    """From one with an optimizer's state as well as from one without."""
    whole, path = saved_run({}, PLAIN)
    for layout in ({"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}):
        ranks = ranks_of(pool, "loaded_weights", layout, hf=tiny_model, path=path)
        assert_same_bits({n: t for r in ranks for n, t in r.items()}, whole["before"])
    bare = tmp_path / "bare"
    for i, layout in enumerate(({"dp": 2, "ep": 2}, {"pp": 2, "vpp": 2})):
        ranks = ranks_of(pool, "saved_weights", layout, hf=tiny_model, path=bare / str(i))
        (found,) = ranks_of(pool, "loaded_weights", {}, hf=tiny_model, path=bare / str(i))
        assert_same_bits(found, {n: t for r in ranks for n, t in r.items()})


def test_a_folder_without_a_checkpoint_is_refused_on_every_rank(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    for texts in ranks_of(pool, "refusals", {"dp": 2}, hf=tiny_model, path=tmp_path):
        assert len(texts) == 2
        assert all(str(tmp_path) in text and "checkpoint" in text for text in texts)
