"""The embedded server's log-probs against the actor's (real Megatron), token for token."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.types import Sample
from tests.helpers.dist import WorkerPool
from tests.helpers.families import COMMON
from tests.truth import untruncated
from tests.truth.models import perturbed, save
from tests.truth.served import Question, embedded, samples
from tests.truth.tolerances import TOLERANCES, check, differences, kind_of

pytestmark = pytest.mark.dist

Case = tuple[str, str, float, bool]  # model, dtype, temperature, routing replayed
CASES: list[Case] = [
    (kind, dtype, temperature, replay)
    for kind in ("dense", "routed")
    for dtype in ("fp32", "bf16")
    for temperature in (1.0, 0.7)
    for replay in ((False, True) if kind == "routed" else (False,))
]
Told = dict[tuple[str, str, float], tuple[Path, list[Sample]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """(model, dtype, temperature) -> its folder, and samples as its server gave them."""
    root, found = tmp_path_factory.mktemp("truth"), {}
    for kind in ("dense", "routed"):
        for dtype in ("fp32", "bf16"):
            folder = save(kind, dtype, root / f"{kind}_{dtype}")
            with embedded(folder, dtype) as server:
                for temperature in (1.0, 0.7):
                    said = samples(server, folder, temperature=temperature)
                    found[kind, dtype, temperature] = folder, said
    return found


Apart = Callable[[int, float], dict[Case, Any]]


@pytest.fixture(scope="module")
def apart(told: Told, pool: WorkerPool) -> Apart:
    """Of an actor with so many tensor-parallel ranks, and at a temperature: differences by case."""

    @cache
    def of(tp: int, temperature: float) -> dict[Case, Any]:
        cases = [case for case in CASES if case[2] == temperature]
        questions = [question(told, case) for case in cases]
        return dict(zip(cases, differences(pool, questions, tp), strict=True))

    return of


def question(told: Told, case: Case, weights: Path | None = None) -> Question:
    kind, dtype, temperature, replay = case
    folder, said = told[kind, dtype, temperature]
    return Question(weights or folder, said, dtype, temperature, replay)


SLOW = [pytest.param(case, 2, marks=pytest.mark.slow) for case in CASES if case[2] != 1.0]


@pytest.mark.parametrize(
    "case, tp",
    [*((case, 1) for case in CASES), *((case, 2) for case in CASES if case[2] == 1.0), *SLOW],
    ids=str,
)
def test_log_probs_are_the_actors(told: Told, apart: Apart, case: Case, tp: int) -> None:
    check(apart(tp, case[2])[case], kind_of(question(told, case)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_in_bf16_replayed_routing_brings_them_nearer(apart: Apart, temperature: float) -> None:
    found = apart(1, temperature)
    own, replayed = (found["routed", "bf16", temperature, replay] for replay in (False, True))
    assert np.abs(own).max() > 2 * np.abs(replayed).max()
    assert np.square(own).mean() > 1.5 * np.square(replayed).mean()


@pytest.mark.parametrize(
    "kind, weight",
    [
        ("dense", "model.layers.2.mlp.down_proj.weight"),
        ("routed", "model.layers.2.mlp.experts.{most_used}.down_proj.weight"),
    ],
)
def test_one_weight_that_is_one_percent_larger_shows(
    told: Told, pool: WorkerPool, tmp_path: Path, kind: str, weight: str
) -> None:
    """Of a layer, or of one expert of a layer."""
    case = (kind, "fp32", 1.0, False)
    folder, said = told[case[:3]]
    chosen = [s.routing[:, 1].reshape(-1) for s in said if s.routing is not None]
    used = int(np.bincount(np.concatenate(chosen)).argmax()) if chosen else 0
    other = perturbed(folder, tmp_path / "other", weight.format(most_used=used))
    (found,) = differences(pool, [question(told, case, other)], 1)
    tolerance = TOLERANCES["fp32"]
    assert np.abs(found).max() > 20 * tolerance.largest
    assert np.abs(found).mean() > 20 * tolerance.mean


def test_what_a_models_folder_recommends_changes_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    folder = save("routed", "fp32", tmp_path / "model")
    untruncated.recommend(folder)
    probabilities = untruncated.next_probabilities(pool, folder, COMMON["vocab_size"], 2.0)
    with embedded(folder) as server:
        untruncated.check(server, probabilities, 2.0, draws=400)
