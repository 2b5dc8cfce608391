"""What was set is what Megatron's objects were built with: accepted and not passed on is the worst
kind of option.
"""

from pathlib import Path
from typing import Any

import pytest

from megarl.config import fields
from tests.actor.compare import mesh_of
from tests.actor.option_rows import ROWS, nested
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

SECTIONS = ("precision", "optim", "recompute", "overlap", "moe")
OURS = {  # which Megatron's objects do not hold
    "moe.routing_replay",  # actor/replay.py
    "precision.fp8.scales",  # of the environment, for Transformer Engine (tests/config/test_fp8.py)
}


def test_every_setting_of_these_sections_has_a_row() -> None:
    keys = {s.key for s in fields.settings() if s.key.split(".")[0] in SECTIONS}
    rows = {row.key for row in ROWS}
    assert keys - rows == OURS
    assert rows - keys == {"train.gradient_accumulation_fusion"}


def test_the_built_objects_hold_what_was_set(pool: WorkerPool, tiny_model: Path) -> None:
    (found,) = pool.run(
        "tests.actor.work_options:read_back", world=1, hf=tiny_model, rows=list(ROWS)
    )
    for row, values in zip(ROWS, found, strict=True):
        if row.refusal:  # Transformer Engine is hidden where there is no GPU
            assert all(row.refusal in str(text) for text in values["set"].values()), row.key
        else:
            assert values["set"] == row.expect, row.key
        if row.key not in row.also:  # else the default is not what it is compared with
            assert values["default"] != row.expect, row.key


BUILT: list[tuple[dict[str, int], list[str]]] = [
    (
        {"dp": 2, "ep": 2},
        [
            *("overlap.param_gather", "moe.token_dispatcher", "moe.router_dtype"),
            *("moe.z_loss_coeff", "moe.aux_loss_coeff", "precision.grad_reduce_dtype"),
            *("recompute.modules", "optim.clip_grad", "optim.schedule.weight_decay"),
        ],
    ),
    ({"pp": 2, "vpp": 2}, ["recompute.method", "precision.dtype"]),
]


@pytest.mark.parametrize("layout, keys", BUILT, ids=str)
def test_an_actor_is_built_with_them(
    pool: WorkerPool, tiny_model: Path, layout: dict[str, int], keys: list[str]
) -> None:
    rows = [row for row in ROWS if row.key in keys]
    assert {row.key for row in rows} == set(keys)
    settings: dict[str, Any] = {}
    expect: dict[str, Any] = {}
    for row in rows:
        settings |= {**row.also, row.key: row.value}
        expect |= row.expect
    results = pool.run(
        "tests.actor.work_options:of_a_built_actor",
        world=mesh_of(layout).world_size,
        **{"hf": tiny_model, "layout": layout, "sections": nested(settings)},
        names=list(expect),
    )
    assert all(found == expect for found in results)


def test_a_rate_for_a_bias_that_the_router_does_not_have_is_refused(
    pool: WorkerPool, tiny_model: Path
) -> None:
    sections = {"moe": {"router_bias_update_rate": 0.1}}
    (text,) = pool.run(
        "tests.actor.work_options:refused", world=1, hf=tiny_model, sections=sections
    )
    assert "moe.router_bias_update_rate: found 0.1, which has no effect" in text
