"""Rows on disk: bit for bit, whole or not at all, and never more than a few."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.data.kept_rows import KEPT_FILES, Fault, KeptRows, kept_rows, read_rows, write_rows
from megarl.data.packing import build_row
from megarl.errors import DataError
from tests.helpers.samples import random_samples

SAMPLES = random_samples(2, 3, seed=7)


def example(step: int = 12, rank: int = 3, **more: object) -> KeptRows:
    rows = [
        build_row(SAMPLES, part, length=length, segment_multiple=4, routing=(2, 3, "uint16"))
        for part, length in (([0, 4, 2], 96), ([5], 96), ([], 48))
    ]
    rows[0].advantages[3] = torch.nan
    for row in rows:
        row.old_logprobs = -torch.arange(float(len(row.tokens))) / 7
        row.old_routing = torch.randint(0, 999, (len(row.tokens) // 4, 2, 3)).to(torch.uint16)
    bad = torch.zeros(96, dtype=torch.bool)
    bad[3] = True
    fault = Fault(0, [0], bad, torch.linspace(-3, 0, 96))
    about = {"whose": "policy", "step": step, "index": 0, "rank": rank, "found": "it", **more}
    return kept_rows(rows, [fault], [s.name for s in SAMPLES], **about)


def test_rows_come_back_bit_for_bit(tmp_path: Path) -> None:
    kept = example()
    path = write_rows(tmp_path, kept)
    assert path == tmp_path / "step_000012_rank_3.npz"
    found = read_rows(path)
    assert (found.whose, found.step, found.index, found.rank, found.found) == (
        *("policy", 12, 0, 3, "it"),
    )
    assert found.names == {i: SAMPLES[i].name for i in (0, 2, 4, 5)}
    for row, original in zip(found.rows, kept.rows, strict=True):
        assert row.samples == original.samples
        for name, value in vars(original).items():
            other = getattr(row, name)
            assert type(other) is type(value)
            if isinstance(value, torch.Tensor):
                assert other.dtype == value.dtype
                assert other.shape == value.shape
                assert other.numpy().tobytes() == value.numpy().tobytes(), name
    assert torch.equal(found.bad[0], kept.bad[0]) and not found.bad[1].any()
    assert torch.equal(found.output[0], kept.output[0]) and found.output[2].isnan().all()


def test_every_optimizer_step_and_model_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = [
        write_rows(tmp_path, example(**about))
        for about in ({}, {"index": 1}, {"whose": "critic"}, {"rank": 30}, {"step": 1234567})
    ]
    assert len({path.name for path in paths}) == 5


def test_the_newest_few_of_a_rank_stay(tmp_path: Path) -> None:
    for step in (9, 10, 11, 101, 102, 99):  # the last one written is the newest, whatever its step
        path = write_rows(tmp_path, example(step=step))
        os.utime(path, ns=(step, step) if step != 99 else (10**9, 10**9))
        write_rows(tmp_path, example(step=step, rank=13))
    mine = sorted(p.name for p in tmp_path.glob("*_rank_3.npz"))
    assert len(mine) == KEPT_FILES == len(list(tmp_path.glob("*_rank_13.npz")))
    assert mine == [f"step_{step:06d}_rank_3.npz" for step in (11, 99, 101, 102)]


def test_a_file_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(OSError):
            write_rows(tmp_path, example())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "text", "format", "count", "objects", "absent"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, damage: str) -> None:
    path = write_rows(tmp_path, example())
    with np.load(path) as file:
        arrays = dict(file)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "text":
        path.write_text("step 12")
    elif damage == "absent":
        path.unlink()
    else:
        changed = {
            "format": {"format": np.asarray(9)},
            "count": {"row_tokens": arrays["row_tokens"] + 1},
            "objects": {"tokens": np.asarray([print], dtype=object)},
        }[damage]
        np.savez(path, **{**arrays, **changed})
    with pytest.raises(DataError, match=path.name):
        read_rows(path)


def test_a_field_that_not_every_row_has_is_left_out(tmp_path: Path) -> None:
    kept = example()
    rows = [kept.rows[0], replace(kept.rows[1], old_logprobs=None), kept.rows[2]]
    found = read_rows(write_rows(tmp_path, replace(kept, rows=rows)))
    assert all(row.old_logprobs is None and row.values is None for row in found.rows)
