"""The real server's log-probs against the actor's (real Megatron), token for token, in float32.

The server is the session's: its model's folder recommends another temperature, top_p and top_k,
which must show nowhere. Other models, bf16 and servers of two ranks: test_truth_matrix.py.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.types import Sample
from tests.helpers.dist import WorkerPool
from tests.sglang.conftest import Models
from tests.sglang.protocol import ok
from tests.sglang.server import SGLangServer
from tests.truth import exact, untruncated
from tests.truth.models import perturbed
from tests.truth.proxy import Proxy
from tests.truth.served import Address, Question, samples
from tests.truth.tolerances import TOLERANCES, check, differences

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.timeout(1500)]

VOCAB = 24
CASES = [(1.0, False), (0.7, False), (1.0, True)]  # temperature, routing replayed


@pytest.fixture
def server(sglang_server: SGLangServer, tiny_models: Models) -> Address:
    """Serving model a."""
    path = str(tiny_models.a)
    ok(sglang_server, "/update_weights_from_disk", model_path=path, weight_version="0")
    return Address(sglang_server.url, sglang_server.key)


@pytest.fixture(scope="module")
def told(sglang_server: SGLangServer, tiny_models: Models) -> dict[float, list[Sample]]:
    """By temperature, what it gave under model a."""
    path = str(tiny_models.a)
    ok(sglang_server, "/update_weights_from_disk", model_path=path, weight_version="0")
    server = Address(sglang_server.url, sglang_server.key)
    return {t: samples(server, tiny_models.a, temperature=t) for t in (1.0, 0.7)}


@pytest.fixture(scope="module")
def apart(
    told: dict[float, list[Sample]], tiny_models: Models, pool: WorkerPool
) -> Callable[[int], dict[Any, Any]]:
    @cache
    def of(tp: int) -> dict[Any, Any]:
        questions = [Question(tiny_models.a, told[t], "fp32", t, replay) for t, replay in CASES]
        return dict(zip(CASES, differences(pool, questions, tp), strict=True))

    return of


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probs_are_the_actors(
    apart: Callable[[int], dict[Any, Any]], case: tuple[float, bool], tp: int
) -> None:
    check(apart(tp)[case], "fp32")


def test_one_expert_that_is_one_percent_larger_shows(
    told: dict[float, list[Sample]], tiny_models: Models, pool: WorkerPool, tmp_path: Path
) -> None:
    chosen = np.concatenate([s.routing[:, 1].reshape(-1) for s in told[1.0]])  # type: ignore[index]
    weight = f"model.layers.1.mlp.experts.{np.bincount(chosen).argmax()}.down_proj.weight"
    other = perturbed(tiny_models.a, tmp_path / "other", weight)
    (found,) = differences(pool, [Question(other, told[1.0], "fp32", 1.0, False)], 1)
    tolerance = TOLERANCES["fp32"]
    assert np.abs(found).max() > 20 * tolerance.largest
    assert np.abs(found).mean() > 20 * tolerance.mean


def test_what_a_models_folder_recommends_changes_nothing(
    server: Address, tiny_models: Models, pool: WorkerPool
) -> None:
    temperature = 2.0
    probabilities = untruncated.next_probabilities(pool, tiny_models.a, VOCAB, temperature)
    untruncated.check(server, probabilities, temperature, draws=200)


def test_samples_are_what_the_server_said_also_when_interrupted(
    server: Address, tiny_models: Models, pool: WorkerPool, tmp_path: Path
) -> None:
    model = tiny_models.a
    with (
        Proxy(server.url).running() as proxy,
        exact.collecting(proxy, server.key, model, model, tmp_path) as collector,
    ):
        counts, said = exact.run(collector, proxy, server, limit=24, after_s=0.3)
    assert min(counts["stop"], counts["length"], counts["continued"]) > 0, counts
    (found,) = differences(pool, [Question(model, said, "fp32", 1.0, True)], 1)
    check(found, "fp32")
