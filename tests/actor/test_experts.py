"""Settings of the router that act on what is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist
slow = pytest.mark.slow


def trained(pool: WorkerPool, hf: Path, layout: dict[str, int], **sections: Any) -> list[Any]:
    return pool.run(
        "tests.actor.work_experts:trained",
        world=mesh_of(layout).world_size,
        **{"hf": hf, "layout": layout, "samples": random_samples(4, 4, seed=8)},
        sections=sections,
    )


@slow
def test_the_router_in_double_precision_chooses_the_same_and_weighs_finer(
    pool: WorkerPool, tiny_model: Path
) -> None:
    single, double = (
        trained(pool, tiny_model, {}, moe={"router_dtype": kind})[0] for kind in ("fp32", "fp64")
    )
    assert single["routed"] == {torch.float32} and double["routed"] == {torch.float64}
    assert torch.allclose(single["logprobs"], double["logprobs"], atol=1e-5)
