"""Learning rate and weight decay of every optimizer step against closed forms, also after a
restart in the middle.

The updates of the first table are all skipped ones, so the checkpoint between them is also that of
an optimizer that has not stepped yet.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

N, LR, MIN, WD, END = 20, 2e-3, 0.1, 0.01, 0.09
LOW = MIN * LR
Rate = Callable[[int], float]


def after_warmup(warmup: int, then: Rate) -> Rate:
    """n / warmup of the full rate in the first ``warmup`` steps, counted from 1."""
    return lambda n: LR * n / warmup if n <= warmup else then(n)


def falling(first: int, shape: Callable[[float], float]) -> Rate:
    """LR up to step ``first``, then to LOW at step N along ``shape`` (1 to 0 over progress)."""
    return lambda n: LR if n <= first else LOW + (LR - LOW) * shape((n - first) / (N - first))


def cosine(p: float) -> float:
    return (1 + math.cos(math.pi * p)) / 2


SHAPES = {
    "linear": lambda p: 1 - p,
    "cosine": cosine,
    "exponential": lambda p: 2 * 0.5**p - 1,
    "minus_sqrt": lambda p: 1 - math.sqrt(p),
}


def constant(n: int) -> float:
    return WD


CASES: dict[str, tuple[dict[str, Any], Rate, Rate]] = {
    "default": ({"min_lr_ratio": 0.0}, lambda n: LR, constant),
    "constant, warm-up": (
        {"warmup_steps": 4, "schedule": {"lr": "constant"}, "min_lr_ratio": 0.0},
        *(after_warmup(4, lambda n: LR), constant),
    ),
    "linear, rising decay": (
        {
            "warmup_steps": 5,
            "schedule": {"lr": "linear", "weight_decay": "linear", "end_weight_decay": END},
        },
        after_warmup(5, falling(5, SHAPES["linear"])),
        lambda n: WD + (END - WD) * n / N,
    ),
    "cosine, rising decay": (
        {
            "schedule": {"lr": "cosine", "weight_decay": "cosine", "end_weight_decay": END},
            "distributed": True,
        },
        falling(0, cosine),
        lambda n: WD + (END - WD) * (1 - math.cos(math.pi * n / N)) / 2,
    ),
    "inverse square root": (
        {"warmup_steps": 3, "schedule": {"lr": "inverse_square_root"}},
        after_warmup(3, lambda n: max(LOW, LR * math.sqrt(3) / math.sqrt(n))),
        constant,
    ),
    "inverse square root, floor": (
        {"min_lr_ratio": 0.4, "schedule": {"lr": "inverse_square_root"}},
        *(lambda n: max(0.4 * LR, LR / math.sqrt(n)), constant),
    ),
    **{
        f"wsd, {name}": (
            {"warmup_steps": 2, "decay_fraction": 0.4, "schedule": {"wsd_decay": name}},
            *(after_warmup(2, falling(12, shape)), constant),
        )
        for name, shape in SHAPES.items()
    },
}


FEW = ("default", "linear, rising decay", "cosine, rising decay", "inverse square root")


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_every_step_has_the_rates_of_the_closed_form(
    pool: WorkerPool, tiny_small: Path, tmp_path: Path, name: str
) -> None:
    settings, lr, decay = CASES[name]
    optim = {"lr": LR, "weight_decay": WD, "min_lr_ratio": MIN, **settings}
    (found,) = pool.run(
        "tests.actor.work_schedules:updates",
        world=1,
        **{"hf": tiny_small, "optim": optim, "total": N, "save_at": 7, "folder": tmp_path},
    )
    assert len(found) == N
    for n, (rate, weight) in enumerate(found, 1):
        assert rate == pytest.approx(lr(n), rel=1e-12, abs=1e-18), n
        assert weight == pytest.approx(decay(n), rel=1e-12), n


@pytest.mark.parametrize("stop", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_two_updates_a_rollout_and_a_restart_between(
    pool: WorkerPool, tiny_small: Path, tmp_path: Path, stop: int
) -> None:
    """The clock is the optimizer step, not the rollout, and it is restored, not replayed."""
    schedule = {"lr": "cosine", "weight_decay": "linear", "end_weight_decay": END}
    optim = {"lr": LR, "weight_decay": WD, "schedule": schedule, "distributed": True}
    (found,) = pool.run(
        "tests.actor.work_schedules:rollouts",
        world=1,
        **{"hf": tiny_small, "optim": optim, "samples": random_samples(4, 2, seed=5)},
        **{"stop": stop, "folder": tmp_path / "checkpoint"},
    )
    assert found["stopped"] == found["through"] and found["same_weights"]
    for n, (rate, weight) in enumerate(found["through"], 1):
        assert rate == pytest.approx(LR * cosine(n / 12), rel=1e-12, abs=1e-18)
        assert weight == pytest.approx(WD + (END - WD) * n / 12, rel=1e-12)
