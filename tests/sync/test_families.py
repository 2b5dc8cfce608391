"""Weights of every family's actor reach a real server, which then computes what transformers does.

``tests/rollout/test_families.py`` has the same in one process.
"""

from pathlib import Path

import pytest
import torch

from tests.helpers.dist import WorkerPool
from tests.helpers.families import reference_logprobs, save_model
from tests.helpers.samples import random_samples
from tests.rollout.test_families import SERVED, other_weights
from tests.sync.servers import digests_of, http, started
from tests.sync.test_broadcast import outcomes, push

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SAMPLES = random_samples(1, 3, seed=8)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("name", SERVED)
def test_an_actors_weights_are_what_the_server_computes_with(
    pool: WorkerPool, tmp_path: Path, name: str, layout: dict[str, int]
) -> None:
    model = save_model(name, tmp_path / "model")
    other = other_weights(model, tmp_path / "other")
    # of widths this small, kernels for few rows give each its own rounding
    with started(model, tmp_path / "run", max_running=16) as server:
        place = {**layout, "etp": 1} if name == "gpt_oss" else layout  # experts with biases
        ranks = push(pool, place, server.described, hf=other)
        assert outcomes(ranks)[0].lost == {}
        assert server.digests() == digests_of(other)
        for sample, expected in zip(SAMPLES, reference_logprobs(other, SAMPLES), strict=True):
            body = {
                "input_ids": sample.tokens.tolist(),
                "sampling_params": {"max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            status, reply = http(server.url, server.key, "/generate", body)
            assert status == 200, reply
            found = [lp for lp, *_ in reply["meta_info"]["input_token_logprobs"][1:]]
            assert (torch.tensor(found).double() - expected).abs().max() < 1e-5
