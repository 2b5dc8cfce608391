"""Ranks agree on which ops run compiled, and their calls are counted together."""

import json
from pathlib import Path

import pytest
import torch

from megarl.operators import describe, write_calls
from megarl.ops import HOST_OPS, KERNELS
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist


def test_ranks_that_agree_know_it(pool: WorkerPool) -> None:
    chosen = [{"policy_loss": "torch"}] * 2
    for found in pool.run("tests.work_operators:agreements", world=2, chosen=chosen):
        assert found == {op: "native" for op in (*KERNELS, *HOST_OPS)} | {"policy_loss": "torch"}


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_runs_another_implementation_ends_the_run_on_all(
    pool: WorkerPool, odd: int
) -> None:
    chosen: list[dict[str, str]] = [{}, {}]
    chosen[odd] = {"gae": "torch"}
    found = pool.run("tests.work_operators:agreements", world=2, chosen=chosen)
    assert found[1 - odd].startswith(f"rank {odd} runs gae torch, another rank gae native; build")
    assert found[odd].startswith(f"rank {1 - odd} runs gae native, another rank gae torch; build")


def test_calls_of_all_ranks_are_added(pool: WorkerPool) -> None:
    ranks = pool.run("tests.work_operators:counted", world=2, calls=3)
    assert ranks[1][1] is None
    assert sum(ranks[0][1].values()) == ranks[0][0] + ranks[1][0] + 3 + 6


def test_a_choice_in_one_line() -> None:
    chosen = {"gae": "native", "whiten": "torch", "digest_partial": "native"}
    line = describe(chosen, torch.device("cpu"))
    assert line == "ops on cpu: native: digest_partial, gae; torch: whiten"


def test_counts_are_kept_as_json(tmp_path: Path) -> None:
    calls = {"gae": {"native": 3, "torch": 1}, "policy_loss": {"native": 24}}
    line = write_calls(tmp_path / "ops.json", {"gae": "native"}, calls)
    assert line == "op calls: gae 3 native, gae 1 torch, policy_loss 24 native"
    kept = json.loads((tmp_path / "ops.json").read_text())
    assert kept == {"backends": {"gae": "native"}, "calls": calls}
