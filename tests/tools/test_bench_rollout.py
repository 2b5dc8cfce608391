"""tools/bench_rollout.py runs, briefly, and says what it promises; times are not tested."""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.tools import tool


@pytest.mark.slow
def test_a_short_measurement(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    bench = tool("bench_rollout")
    try:
        path = tmp_path / "bench.json"
        found = bench.main(["--seconds", "0.5", "--memory-seconds", "1", "--json", str(path)])
    finally:
        os.sched_setaffinity(0, cores)
    assert found == json.loads(path.read_text())
    rows = [found["small"], *found["routing"]]
    assert [row["experts"] for row in rows] == [0, 128, 256, 384]
    for row in rows:
        assert row["samples"] > 0 and row["samples"] % 8 == 0 and row["cpu_seconds"] > 0
        rate = row["samples"] / row["seconds"]
        assert row["samples_per_second"] == pytest.approx(rate, abs=1)
    # 48 layers of 8 experts in 4 bytes for 128 + 511 tokens, in base64
    table = 48 * 8 * 4 * 639 * 4 / 3 / 1e6
    for row in rows[1:]:
        assert table < row["mb_of_a_sample"] < 1.05 * table
        assert row["mb_per_second"] == pytest.approx(
            row["mb_of_a_sample"] * row["samples"] / row["seconds"], rel=1e-2
        )
    assert len(found["memory"]["resident_mb"]) == 3
