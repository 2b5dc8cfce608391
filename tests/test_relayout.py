"""Per-token numbers arrive in the rows of another layout as they were, to the last bit."""

import numpy as np
import pytest
import torch

from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist

ODD = [float("nan"), -0.0, float("inf"), float("-inf"), 1e-45, -3.4e38]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tp": 2}, {"dp": 2}),
        ({"cp": 2}, {"pp": 2}),
        ({"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}),
        ({"dp": 2}, {"tp": 2}),
    ],
    ids=str,
)
def test_every_number_of_every_sample_arrives_once_where_it_is_used(
    pool: WorkerPool, first: dict[str, int], second: dict[str, int]
) -> None:
    """Both ways; on every rank of a last stage that holds the sample, and nowhere else."""
    samples = random_samples(5, 3, seed=8)
    rng = np.random.default_rng(2)
    numbers = [torch.from_numpy(rng.normal(size=len(s.tokens)).astype("f4")) for s in samples]
    for k, odd in enumerate(ODD):
        numbers[k][-1 - k % 2] = odd
    work = "tests.work_relayout:moved"
    given = {"first": first, "second": second, "samples": samples, "numbers": numbers}
    ranks = pool.run(work, world=2, **given)
    for k, name in enumerate(("values", "returns")):
        places = [i for r in ranks for i in r[name]]
        assert set(places) == set(range(len(samples)))
        if (second, first)[k].get("dp") == 2:
            assert len(places) == len(samples)
        for rank in ranks:
            assert bool(rank[name]) == rank["holds"][k]
            for i, bits in rank[name].items():
                assert bits == numbers[i].view(torch.int32).tolist(), (name, i)
