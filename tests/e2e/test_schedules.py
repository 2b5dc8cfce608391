"""Runs that sample ahead: as stale as they may be, and where promised the same bit for bit."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.books import read_books
from megarl.data.recorded import read_samples, recorded_path, write_samples
from tests.e2e.claims import false_claims
from tests.e2e.conftest import Inputs, Launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]

Start = Callable[..., Launch]
TIMES = ("time", "perf/", "sync/seconds", "rollout/wait_seconds", "memory/")
EFFORTS = ("rollout/attempts", "rollout/sampled_tokens")  # more where servers die


def numbers(run: Launch) -> list[dict[str, Any]]:
    """Of every step, without what a clock says."""
    return [
        {k: v for k, v in m.items() if not k.startswith((*TIMES, *EFFORTS))} for m in run.metrics()
    ]


def assert_same(a: Path, b: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        one = read_samples(recorded_path(a / "rollouts", step))
        two = read_samples(recorded_path(b / "rollouts", step))
        assert [s.serial for s in one] == [s.serial for s in two]
        for x, y in zip(one, two, strict=True):
            spans = [[(v.version, v.start, v.end) for v in z.version_spans] for z in (x, y)]
            assert spans[0] == spans[1]  # whichever server sampled them
            for name in ("tokens", "mask", "rollout_logprobs", "rewards"):
                assert np.array_equal(getattr(x, name), getattr(y, name)), (step, x.name, name)


@pytest.mark.parametrize("schedule", ["synchronous", "one_step_off"])
def test_a_deterministic_run_repeats_bit_for_bit_also_when_killed(
    launch: Start, inputs: Inputs, tmp_path: Path, schedule: str
) -> None:
    settings = [
        "run.steps=6",
        f"rollout.schedule={schedule}",
        "rollout.deterministic=true",
        "rollout.servers=2",
        "checkpoint.every=2",
        "eval.every=3",
        "monitor.record_rollouts=true",
        "algo.dynamic_sampling={max_rounds: 2}",
        "on_failure={servers: restart, collectors: restart}",
    ]
    whole = launch(inputs.rl(tmp_path / "whole", *settings))
    assert whole.wait() == 0, whole.text()
    killed = launch(inputs.rl(tmp_path / "killed", *settings))
    saved = killed.run / "checkpoints/step_4/loop.json"
    deadline = time.monotonic() + 240
    struck = False
    while not saved.exists():
        assert time.monotonic() < deadline and killed.process.poll() is None, killed.text()
        time.sleep(0.02)
        if not struck and (killed.run / "checkpoints/step_2").exists():
            struck = True  # a server, before the ranks: its samples are sampled again
            os.kill(killed.server().pid, signal.SIGKILL)
    killed.rank(0).kill()
    assert killed.wait() != 0
    again = launch(inputs.rl(tmp_path / "killed", *settings, "run.resume=true"))
    assert again.wait() == 0, again.text()
    assert_same(whole.run, again.run, 6)
    ones, twos = numbers(whole), numbers(again)
    assert [m["step"] for m in twos] == [m["step"] for m in ones]
    for one, two in zip(ones, twos, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("servers/")} == {
            k: v for k, v in two.items() if not k.startswith("servers/")
        }
    assert (whole.run / "books.jsonl").read_text() == (again.run / "books.jsonl").read_text()
    ages = [m["staleness/max"] for m in ones[1:]]
    least = {"synchronous": 0, "one_step_off": 1}[schedule]  # a version more for what was left over
    assert ages[0] == 0 and all(least <= age <= least + 1 for age in ages[1:]), ages


def test_an_asynchronous_run_is_never_staler_than_allowed(
    launch: Start, inputs: Inputs, tmp_path: Path
) -> None:
    settings = [
        "run.steps=10",
        "rollout.schedule=asynchronous",
        "rollout.max_staleness=2",
        "rollout.servers=2",
        "monitor.record_rollouts=true",
        "checkpoint={every: 1, keep: 20}",
        "algo.correction={level: token, mode: truncate, high: 2.0}",
    ]
    run = launch(inputs.rl(tmp_path / "run", *settings))
    assert run.wait() == 0, run.text()
    metrics = run.metrics()
    assert max(m["staleness/max"] for m in metrics[1:]) in (1, 2)
    for step in range(1, 11):
        samples = read_samples(recorded_path(run.run / "rollouts", step))
        assert min(v.version for s in samples for v in s.version_spans) >= step - 1 - 2
        assert max(v.version for s in samples for v in s.version_spans) <= step - 1
        shares = sum(v for k, v in metrics[step].items() if k.startswith("staleness/tokens_"))
        assert shares == pytest.approx(1.0)
    balance = read_books(run.run / "books.jsonl")
    assert balance.balanced
    assert len(balance.ended["trained"]) == 80
    assert false_claims(run.run, inputs.hf) == []
    assert_wrong_claims_are_found(run.run, inputs.hf, tmp_path / "wrong")
    print(json.dumps({k: len(v) for k, v in balance.ended.items()}))


def assert_wrong_claims_are_found(run: Path, hf: Path, folder: Path) -> None:
    """One sample of every step claims a version too many or too few, and is named for it."""
    wrong = []
    for step in range(2, 10):
        samples = read_samples(recorded_path(run / "rollouts", step))
        at = max(range(len(samples)), key=lambda i: samples[i].trained_tokens)
        chosen = samples[at]
        by = 1 if step % 2 else -1
        if chosen.version_spans[0].version + by < 0:
            by = 1
        spans = tuple(replace(v, version=v.version + by) for v in chosen.version_spans)
        samples[at] = replace(chosen, version_spans=spans)
        write_samples(recorded_path(folder, step), samples)
        wrong += [(step, chosen.name, span.version) for span in spans]
    found = {(step, name, version): by for step, name, version, by in false_claims(run, hf, folder)}
    print("wrong claims:", found)
    assert sorted(found) == sorted(wrong)
