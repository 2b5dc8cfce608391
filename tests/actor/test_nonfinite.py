"""Numbers that are not finite: what ``train.on_nonfinite`` makes of them, on all ranks alike, and
the rows that are kept of them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.kept_rows import read_rows
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist
slow = pytest.mark.slow

SAMPLE = "p1/2"  # the one that work_nonfinite.py spoils; it lies on one rank of the two
DP2, DP2_PP2 = {"dp": 2}, {"dp": 2, "pp": 2}


def step(
    pool: WorkerPool,
    hf: Path,
    folder: Path,
    spoil: str,
    on_nonfinite: str,
    layout: dict[str, int] | None = None,
    **more: Any,
) -> list[Any]:
    layout = layout or DP2
    return pool.run(
        "tests.actor.work_nonfinite:step",
        world=mesh_of(layout).world_size,
        **{"hf": hf, "layout": layout, "spoil": spoil, "on_nonfinite": on_nonfinite},
        **{"folder": folder, **more},
    )


def kept(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "nonfinite").iterdir())


@pytest.mark.parametrize("spoil", ["nan", "gradient"])
def test_the_optimizer_step_is_skipped_on_every_rank(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, spoil: str
) -> None:
    results = step(pool, tiny_model, tmp_path, spoil, "skip")
    assert [moved for moved, *_ in results] == [0, 0]
    assert sum(metrics["optim/skipped"] for _, metrics, _ in results) == 1
    assert all("optim/grad_norm" not in metrics for _, metrics, _ in results)
    bad = sum(metrics["policy/nonfinite_tokens"] for _, metrics, _ in results)
    assert bad == (1 if spoil == "nan" else 0)


@pytest.mark.parametrize("spoil", ["nan", *(pytest.param(x, marks=slow) for x in ("inf", "-inf"))])
def test_a_spoilt_sample_can_be_left_out(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, spoil: str
) -> None:
    results = step(pool, tiny_model, tmp_path, spoil, "drop")
    assert all(moved > 0 for moved, *_ in results)
    assert sum(metrics["policy/nonfinite_tokens"] for _, metrics, _ in results) == 1


@pytest.mark.parametrize("how", ["raise", "drop"])
def test_a_spoilt_gradient_cannot_be_left_out(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, how: str
) -> None:
    for text in step(pool, tiny_model, tmp_path, "gradient", how):
        assert "in the gradient" in text and f"train.on_nonfinite={how}" in text


def test_the_error_names_the_sample_on_every_rank(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    for text in step(pool, tiny_model, tmp_path, "nan", "raise"):
        assert SAMPLE in text and "train.on_nonfinite=raise" in text
        assert str(tmp_path / "nonfinite") in text


@pytest.mark.parametrize("spoil", ["mask", "truncated"])
def test_a_step_without_trained_tokens_moves_nothing(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, spoil: str
) -> None:
    results = step(pool, tiny_model, tmp_path, spoil, "skip")
    assert [moved for moved, *_ in results] == [0, 0]
    assert sum(metrics["optim/skipped"] for _, metrics, _ in results) == 1


def test_of_two_optimizer_steps_the_one_without_trained_tokens_is_left_out(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path
) -> None:
    results = step(pool, tiny_model, tmp_path, "mask of a minibatch", "skip", minibatches=2)
    assert all(moved > 0 for moved, *_ in results)
    assert sum(metrics["optim/skipped"] for _, metrics, _ in results) == 1
    assert not (tmp_path / "nonfinite").exists()


@pytest.mark.parametrize(
    "layout, spoil",
    [
        (DP2_PP2, "nan"),
        pytest.param(DP2_PP2, "inf", marks=slow),
        pytest.param(DP2_PP2, "parameter", marks=slow),
        pytest.param(DP2_PP2, "gradient", marks=slow),
        pytest.param({"tp": 2}, "nan", marks=slow),
        pytest.param({"cp": 2}, "nan", marks=slow),
    ],
    ids=str,
)
def test_the_rows_are_kept_and_can_be_run_again(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, layout: dict[str, int], spoil: str
) -> None:
    results = step(pool, tiny_model, tmp_path, spoil, "skip", layout=layout)
    everywhere = spoil in ("parameter", "gradient")
    # ranks of the last stage that hold such rows; of a gradient nobody knows whose it was
    files = kept(tmp_path)
    assert len(files) == (2 if everywhere else 1)
    seen: set[str] = set()
    for name in files:
        rows = read_rows(tmp_path / "nonfinite" / name)
        assert (rows.whose, rows.step, rows.index) == ("policy", 12, 0)
        assert name == f"step_000012_rank_{rows.rank}.npz"
        _, _, trained = results[rows.rank]
        assert len(rows.rows) == len(trained)
        for row, original in zip(rows.rows, trained, strict=True):
            assert_same_row(vars(row), original)
        seen |= check_what_was_bad(rows, spoil)
        if spoil != "gradient":  # which a hook spoilt, not the rows
            again = {"hf": tiny_model, "path": tmp_path / "nonfinite" / name}
            (found,) = pool.run(
                "tests.actor.work_nonfinite:run_again",
                world=1,
                **again,
                parameter=spoil == "parameter",
            )
            assert {rows.names[i] for i in found} == names_of_bad(rows)
    assert seen == ({SAMPLE} if not everywhere else seen)


def assert_same_row(found: dict[str, Any], original: dict[str, Any]) -> None:
    for name, value in original.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name].nan_to_num(9.0), value.nan_to_num(9.0)), name
        else:
            assert found[name] == value, name


def names_of_bad(rows: Any) -> set[str]:
    return {
        rows.names[i]
        for row, bad in zip(rows.rows, rows.bad, strict=True)
        for i, start, length in row.segments()
        if bad[start : start + length].any()
    }


def check_what_was_bad(rows: Any, spoil: str) -> set[str]:
    """The samples with marked tokens; the model's numbers there show on whom it lies."""
    outputs = torch.cat(rows.output)[torch.cat(rows.bad)]
    if spoil == "gradient":
        assert not len(outputs)
    elif spoil == "parameter":
        assert outputs.isnan().all()
        trained = {rows.names[i] for row in rows.rows for i, s, n in row.segments()
                   if row.mask[s : s + n].any()}  # fmt: skip
        assert names_of_bad(rows) == trained
    else:
        assert len(outputs) and outputs.isfinite().all()
    return names_of_bad(rows)


@pytest.mark.parametrize("how", ["raise", pytest.param("skip", marks=slow)])
def test_a_disk_that_takes_nothing_hides_nothing(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, how: str
) -> None:
    (tmp_path / "file").write_text("")
    for result in step(pool, tiny_model, tmp_path, "nan", how, keep_in=tmp_path / "file" / "below"):
        assert (SAMPLE in result) if how == "raise" else result[0] == 0
