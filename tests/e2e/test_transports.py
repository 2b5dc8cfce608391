"""Runs whose weights take other ways to the servers: the same run, to the last bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.models.published import MANIFEST
from tests.e2e.conftest import Inputs, Launch
from tests.e2e.test_schedules import assert_same, numbers

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_every_transport_gives_the_same_run_with_and_without_memory_given_back(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path
) -> None:
    settings = [
        *("run.steps=3", "eval.every=3", "rollout.deterministic=true", "rollout.servers=2"),
        *("monitor.record_rollouts=true", "sync.bucket_mb=0.1"),
    ]
    ways = {
        "broadcast": [],
        "colocated": ["sync.transport=colocated", "rollout.release_memory=true"],
        "disk": ["sync.transport=disk", "sync.senders=2", "rollout.release_memory=true"],
    }
    runs: dict[str, Launch] = {}
    for way, own in ways.items():
        run = runs[way] = launch(inputs.rl(tmp_path / way, *settings, *own))
        assert run.wait() == 0, (way, run.text())
        assert [m["sync/version"] for m in run.metrics()] == [0, 1, 2, 3]
        assert [m["servers/serving"] for m in run.metrics()] == [2] * 4
        assert_same(tmp_path / "broadcast", tmp_path / way, 3)
        assert numbers(run)[-1]["eval/accuracy"] == numbers(runs["broadcast"])[-1]["eval/accuracy"]
    weights = tmp_path / "disk" / "weights"
    assert {path.name for path in weights.iterdir()} == {".megarl-lock", "version_2", "version_3"}
    assert (weights / "version_3" / MANIFEST).is_file()
