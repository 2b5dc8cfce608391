"""Samples reach every rank bit for bit, in the order of the collectors."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest

from megarl.types import Sample, VersionSpan
from tests.helpers.dist import WorkerPool
from tests.helpers.samples import random_samples

pytestmark = pytest.mark.dist


def assert_same_bits(found: Sequence[Sample], expected: Sequence[Sample]) -> None:
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        for field in fields(Sample):
            a, b = getattr(one, field.name), getattr(two, field.name)
            if isinstance(b, np.ndarray):
                assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
                assert a.tobytes() == b.tobytes(), field.name
            else:
                assert type(a) is type(b) and a == b, field.name


def unusual_samples() -> list[Sample]:
    """Every field at its limits: several rewards or none, routing or none, versions, NaN bits."""
    plain, routed, bare = random_samples(1, 3, seed=6)
    length = len(routed.tokens)
    first = np.random.default_rng(0).integers(0, 8, (length - 1, 3))
    routing = np.stack([first, (first + 5) % 8], -1).astype(np.uint16)
    odd = np.array([np.nan, -np.nan, -0.0, np.inf], np.float32)
    logprobs = np.resize(odd, length)
    spans = (VersionSpan(7, 0, 2), VersionSpan(9, 2, 5))
    return [
        plain,
        Sample(
            **vars(routed)
            | {"prompt_id": "päß,\n\0x", "routing": routing, "rollout_logprobs": logprobs}
            | {"version_spans": spans, "rewards": np.array([1, -0.0, 2], np.float32)}
            | {"trajectory": 3, "values": logprobs, "ref_logprobs": logprobs[::-1].copy()}
            | {"step_rewards": odd, "step_ends": np.arange(4, dtype=np.int32)}
        ),
        Sample(**vars(bare) | {"rewards": np.zeros(0, np.float32), "truncated": True}),
    ]


@pytest.mark.parametrize("collected", ["both", "first empty", "second empty", "none"])
def test_every_rank_has_the_samples_of_all_collectors_in_their_order(
    pool: WorkerPool, collected: str
) -> None:
    zero = [] if collected in ("first empty", "none") else random_samples(2, 3, seed=1)
    one = [] if collected in ("second empty", "none") else unusual_samples()
    ranks = pool.run(
        "tests.work_hostcomm:shared_samples",
        world=2,
        collected={0: zero, 1: one},
        orders=[[0, 1], [1, 0], [1]],
    )
    for seen in ranks:
        for found, expected in zip(seen, [zero + one, one + zero, one], strict=True):
            assert_same_bits(found, expected)
