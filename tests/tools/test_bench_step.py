"""tools/bench_step.py runs, tiny, and says what it promises. Times themselves are not tested."""

import json
import statistics
from pathlib import Path

import pytest

from tests.helpers.dist import WorkerPool

TINY = {
    **{"hidden": 32, "layers": 2, "heads": 2, "kv-heads": 1, "head-dim": 16, "experts": 4},
    **{"moe-ffn": 16, "vocab": 128, "row-tokens": 64, "longest": 32, "samples": 8, "repeats": 2},
}
PHASES = {"pack", "advantages", "to_device", "forward_backward", "logprobs", "loss", "metrics"}
PHASES |= {"finite_check", "optimizer"}


@pytest.mark.dist
def test_both_loops_train_the_same_rows_and_are_timed(pool: WorkerPool, tmp_path: Path) -> None:
    """The tool itself compares the bare loop's loss with the log-probs of ours."""
    out = tmp_path / "step.json"
    arguments = [f"--{name}={value}" for name, value in TINY.items()] + [f"--json={out}"]
    (found,) = pool.run("tests.tools.work_bench_step:bench", world=1, arguments=arguments)
    assert json.loads(out.read_text()) == found
    assert found["model"]["hidden"] == 32 and len(found["rows"]) > 1
    for times in (found["wall"], found["cpu"]):
        assert {name: len(of) for name, of in times.items()} == {"ours": 2, "bare": 2}
        assert all(seconds > 0 for of in times.values() for seconds in of)
    ours, bare = found["wall"]["ours"], found["wall"]["bare"]
    assert found["overhead"] == pytest.approx(min(ours) / min(bare) - 1)
    medians = [statistics.median(of) for of in (ours, bare)]
    assert found["overhead_median"] == pytest.approx(medians[0] / medians[1] - 1)
    phases = found["phases"]
    assert phases.keys() == PHASES | {"total"}
    assert all(phases[name] > 0 for name in PHASES)
    assert sum(phases[name] for name in PHASES) <= phases["total"]
