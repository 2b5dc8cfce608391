"""``tools/moe_stability.py``: what is done to the weights on their way, and that a study runs and
goes on where it stopped.
"""

import csv
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
TOOL = ROOT / "tools" / "moe_stability.py"
NAMES = ("model.embed_tokens.weight", "a.weight", "b.weight", "model.norm.weight")


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("moe_stability", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["moe_stability"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["moe_stability"]


class Weights:
    """A trainer's: every push has other ones."""

    def __init__(self) -> None:
        self.version = -1

    def at(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        shapes = [[200, 96] if name != NAMES[-1] else [96] for name in NAMES]
        drawn = (torch.randn(shape, generator=generator) for shape in shapes)
        return dict(zip(NAMES, drawn, strict=True))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.version += 1
        yield from self.at(self.version).items()


def pushes(tool: ModuleType, count: int, seed: int = 0, **condition: Any) -> list[dict[str, Any]]:
    sent = tool.Changed(Weights(), tool.Condition(**condition), seed)
    return [dict(sent.tensors()) for _ in range(count)]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], t) for n, t in other.items())


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_lag_sends_the_weights_of_so_many_updates_before(tool: ModuleType, lag: int) -> None:
    for version, sent in enumerate(pushes(tool, 6, lag=lag)):
        assert equal(sent, Weights().at(max(0, version - lag)))


def test_noise_is_relative_other_in_every_push_and_of_the_seed(tool: ModuleType) -> None:
    for level in (0.01, 0.3):
        one, two = pushes(tool, 2, noise=level)
        for name in NAMES[:3]:
            for version, sent in enumerate((one, two)):
                true = Weights().at(version)[name]
                relative = (sent[name] - true).square().mean().sqrt() / true.square().mean().sqrt()
                assert float(relative) == pytest.approx(level, rel=0.03)
        noises = [one[n] - Weights().at(0)[n] for n in NAMES[:3]]
        assert not torch.allclose(noises[0], noises[1])
        assert not torch.allclose(noises[0], two[NAMES[0]] - Weights().at(1)[NAMES[0]])
        assert equal(pushes(tool, 1, noise=level)[0], one)
        assert not equal(pushes(tool, 1, noise=level, seed=1)[0], one)


def test_a_study_has_every_objective_under_every_condition(tool: ModuleType) -> None:
    cells = tool.study(3)
    assert len({cell.name for cell in cells}) == len(cells)
    plain = {(c.objective, c.condition) for c in cells if (c.replay, c.correction) == ("none",) * 2}
    assert plain == set(product(("grpo", "gspo", "sapo", "aspo"), tool.CONDITIONS))
    assert {c.seed for c in cells} == {0, 1, 2}
    assert tool.CONDITIONS["fp8"].settings and tool.CONDITIONS["exact"] == tool.Condition()
    for condition in ("fp8", "noise", "stale"):
        of = {(c.replay, c.correction) for c in cells if c.condition == condition}
        assert {("R2", "none"), ("R3", "none"), ("none", "tis"), ("none", "icepop")} <= of


def test_a_summary_is_of_the_cells_that_are_done(tool: ModuleType, tmp_path: Path) -> None:
    """A study that is under way has some; its summary comes at the end."""
    assert json.loads(run("--out", tmp_path, "--json")) == []
    steps = [{"step": k, "eval/accuracy": k / 8, "mismatch/ess": k / 8} for k in range(1, 9)]
    for cell in tool.QUICK:
        folder = tmp_path / "cells" / cell.name
        folder.mkdir(parents=True)
        found = {"cell": asdict(cell), "steps": steps, "exit_code": 0, "stamp": []}
        (folder / "cell.json").write_text(json.dumps(found | {"seconds": 1, "cpu_seconds": 2}))
    lines = json.loads(run("--out", tmp_path, "--json"))
    assert {line["objective"] for line in lines} == {cell.objective for cell in tool.QUICK}
    for line in lines:
        assert line["eval/accuracy"] == 0.75 and line["mismatch/ess"] == 0.5625  # 4..8, 1..8 of 8


def run(*arguments: object) -> str:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_quick_study_runs_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "study"
    first = run("--out", out, "--quick")
    assert first.count("accuracy 0.") == 2
    times = {p: p.stat().st_mtime_ns for p in out.glob("cells/*/cell.json")}
    broken = out / "cells" / "sapo-stale-none-none-0" / "cell.json"
    broken.write_text(json.dumps({**json.loads(broken.read_text()), "exit_code": 1}))
    times.pop(broken)
    run("--out", out, "--quick")
    assert len(times) == 1 and all(p.stat().st_mtime_ns == t for p, t in times.items())
    found = json.loads(run("--out", out, "--json"))
    assert [line["exit_code"] for line in found] == [0, 0]
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    stale = [float(r["mismatch/kl_rollout_train_k3"]) for r in rows if r["condition"] == "stale"]
    assert stale[0] < 1e-9 < 1e-7 < stale[1] < stale[2]  # what both start from, then one and two
    noisy = [float(r["mismatch/kl_rollout_train_k3"]) for r in rows if r["condition"] == "noise"]
    changed = [float(r["moe/replay_changed"]) for r in rows if r["condition"] == "noise"]
    assert min(noisy) > 1e-5 and min(changed) > 0.005
    images = {
        "accuracy",
        "gradient_norm",
        "entropy",
        "server_kl",
        "gates",
        "mismatch",
        "mitigations",
    }
    assert {p.stem for p in out.glob("*.png")} == images
