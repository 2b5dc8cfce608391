"""Models that lie in host memory while idle compute the same bits; so do models whose weights were
those of the reference for a while.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actor.compare import merged, mesh_of
from tests.actor.test_critic import assert_same_bits
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

WORK = "tests.actor.work_residence"
BF16 = {"precision": {"dtype": "bf16"}, "optim": {"lr": 1e-3, "distributed": True}}
PLAIN = {"optim": {"lr": 1e-3, "distributed": False}}
SHARDED = {"optim": {"lr": 1e-3, "distributed": True}}
EP2 = {"dp": 2, "ep": 2}
VPP2 = {"pp": 2, "vpp": 2}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        (EP2, BF16),
        pytest.param({}, PLAIN, marks=slow),
        pytest.param(VPP2, SHARDED, marks=slow),
        pytest.param({"tp": 2}, BF16, marks=slow),
        pytest.param({"cp": 2}, SHARDED, marks=slow),
    ],
    ids=str,
)
def test_an_idle_model_holds_no_device_memory_and_trains_the_same_bits(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, layout: dict[str, int], sections: Any
) -> None:
    runs = {}
    for offload in ("none", "idle"):
        given = {"hf": tiny_model, "layout": layout, "path": tmp_path / offload}
        given |= {**sections, "memory": {"offload": offload}}
        world = mesh_of(layout).world_size
        runs[offload] = pool.run(f"{WORK}:trained", world=world, **given)
    for stayed, moved in zip(runs["none"], runs["idle"], strict=True):
        # what is kept on the host by design: the optimizer's scalars; tensors without a number
        assert all(held < 0.001 * stayed["whole"] for held in moved["held"])
        assert min(stayed["held"]) > 0.2 * stayed["whole"]
        assert moved["whole"] == stayed["whole"] > 1e5
    found, expected = merged(runs["idle"]), merged(runs["none"])
    assert found["metrics"] == expected["metrics"]
    assert_same_bits(found["weights"], expected["weights"])
    again = {n: t for r in runs["idle"] for n, t in r["again"].items()}
    assert_same_bits(again, expected["weights"])


def test_of_actor_and_critic_one_is_on_the_device_at_a_time(
    pool: WorkerPool, tiny_model: Path
) -> None:
    (seen,) = pool.run(f"{WORK}:alternating", world=1, hf=tiny_model, layout={})
    small = 1e3
    assert all(min(pair) < small for pair in seen), seen
    assert max(seen[-1]) < small  # after the step, both are away
    for k in range(2):
        assert any(pair[k] > 1e5 for pair in seen)


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        (VPP2, BF16),
        pytest.param(EP2, {**SHARDED, "memory": {"offload": "idle"}}, marks=slow),
        pytest.param({"tp": 2}, BF16, marks=slow),
        pytest.param({}, PLAIN, marks=slow),
    ],
    ids=str,
)
def test_the_reference_is_the_policy_of_a_moment_and_survives_a_stop(
    pool: WorkerPool, tiny_model: Path, tmp_path: Path, layout: dict[str, int], sections: Any
) -> None:
    """To the last bit; and its passes leave every bit of the policy as it was, main parameters and
    moments included.
    """
    given = {"hf": tiny_model, "layout": layout, "path": tmp_path / "at", **sections}
    ranks = pool.run(f"{WORK}:references", world=mesh_of(layout).world_size, **given)
    moved = 0.0
    for rank in ranks:
        assert rank["kept"] and rank["whole undisturbed"] and rank["rest undisturbed"]
        for name in ("refs", "olds"):
            whole, rest = rank["whole"][name], rank["rest"][name]
            assert all(torch.equal(a, b) for a, b in zip(whole, rest, strict=True)), name
        for ref, old in zip(rank["whole"]["refs"], rank["whole"]["olds"], strict=True):
            moved = max(moved, float((ref - old).abs().max()))
        assert_same_bits(rank["rest"]["weights"], rank["whole"]["weights"])
    assert moved > 1e-3  # the policy has left the reference
