"""tools/measure_delta.py trains and pushes, tiny, and what it counts adds up."""

import json
from pathlib import Path

import pytest

from tests.helpers.dist import WorkerPool

TINY = {
    **{"hidden": 128, "layers": 1, "heads": 2, "kv-heads": 1, "head-dim": 64, "experts": 4},
    **{"topk": 2, "moe-ffn": 128, "vocab": 128, "row-tokens": 64, "longest": 16, "samples": 4},
    **{"steps": 2, "skip": 1},
}


@pytest.mark.dist
def test_larger_steps_change_more_and_a_push_is_never_more_than_whole(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """The tool itself compares the digest of every tensor that a receiver has."""
    out = tmp_path / "delta.json"
    arguments = [f"--{name}={value}" for name, value in TINY.items()]
    arguments += ["--lr", "1e-7", "1e-5", f"--json={out}"]
    (found,) = pool.run("tests.tools.work_measure_delta:measure", world=1, arguments=arguments)
    assert json.loads(out.read_text()) == found
    rows = {(row["lr"], row["form"]): row for row in found["results"]}
    forms = ("bf16", "fp8 f32", "fp8 power_of_two")
    assert rows.keys() == {(lr, form) for lr in (1e-7, 1e-5) for form in forms}
    for row in rows.values():
        assert 0 < row["bytes"] < 1 and 0 < row["raw"] <= 1
        assert row["by_kind"].keys() == {"attention", "embeddings", "experts", "other"}
        assert len(row["by_step"]) == 2
        assert row["encode_gb_per_s"] > 0 < row["apply_gb_per_s"]
        # Of the one step that counts, and of all its parts.
        assert row["by_step"][1] == {key: row[key] for key in ("changed", "bytes", "raw")}
    for form in forms:
        small, large = rows[1e-7, form], rows[1e-5, form]
        assert small["changed"] < large["changed"] and small["bytes"] < large["bytes"]
    for lr in (1e-7, 1e-5):
        bf16, fp8 = rows[lr, "bf16"], rows[lr, "fp8 f32"]
        # Codes are coarser than what they stand for, and take a byte where that took two.
        assert fp8["by_kind"]["experts"]["changed"] < bf16["by_kind"]["experts"]["changed"]
        assert fp8["whole_bytes"] < bf16["whole_bytes"]
