"""Controllers of coefficients, step by step as their papers have them."""

import json
import math
from typing import Any

import pytest

from megarl.algos.control import Constant, Controllers, EntropyController, KlController
from megarl.config.algo import AdaptiveEntropy, AdaptiveKl, AlgoSection
from megarl.types import Coefficients


def algo(**sections: Any) -> AlgoSection:
    return AlgoSection.model_validate({"policy": {"name": "reinforce"}, **sections})


ENTROPIES = [0.5, 0.1, 0.2, 0.2000001, 0.05, 0.01, 0.3, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_the_entropy_bonus_follows_the_reports_rule() -> None:
    """alpha_k = c_k [e_k <= target]; then c moves by delta, within its bounds."""
    settings = {"target": 0.2, "delta": 0.25, "c0": 0.5, "c_min": 0.25, "c_max": 1.0}
    control = EntropyController(AdaptiveEntropy(**settings), settings["c0"])
    c = 0.5
    for e in ENTROPIES:
        low = e <= 0.2
        assert control.coefficient(e) == (c if low else 0.0)
        c = min(1.0, max(0.25, c + (0.25 if low else -0.25)))
        control.update(e, samples=3)
        assert control.state() == c


def test_the_bonus_starts_at_zero_and_grows_by_delta() -> None:
    control = Controllers.of(algo(entropy={"name": "adaptive"}))
    seen = []
    for _ in range(4):
        seen.append(control.coefficients(kl=0.0, entropy=0.1).entropy)
        control.update(kl=0.0, entropy=0.1, samples=1)
    assert seen == pytest.approx([0.0, 0.005, 0.01, 0.015], rel=1e-12)


def test_the_divergence_coefficient_follows_its_error_clipped_at_20_percent() -> None:
    section = AdaptiveKl(target=0.5, horizon=100)
    control, beta = KlController(section, 0.1), 0.1
    for measured, samples in [(0.5, 10), (0.55, 10), (5.0, 50), (0.0, 50), (0.45, 100), (-1.0, 1)]:
        assert control.coefficient(measured) == pytest.approx(beta, rel=1e-12)
        control.update(measured, samples)
        beta *= 1 + max(-0.2, min(0.2, measured / 0.5 - 1)) * samples / 100
        assert control.state() == pytest.approx(beta, rel=1e-12)


def test_constants_do_not_move() -> None:
    control = Controllers.of(algo(kl={"coef": 0.3}, entropy={"name": "constant", "coef": 0.01}))
    for measured in (0.0, 1.0, 1e9):
        assert control.coefficients(measured, measured) == Coefficients(kl=0.3, entropy=0.01)
        control.update(measured, measured, 100)


def test_without_sections_there_are_no_terms() -> None:
    control = Controllers.of(algo())
    assert control.coefficients(1.0, 0.0) == Coefficients(0.0, 0.0)
    assert isinstance(control.kl, Constant) and isinstance(control.entropy, Constant)


def test_a_run_that_goes_on_has_the_same_coefficients() -> None:
    """Through JSON, as a checkpoint keeps them."""
    settings = algo(
        kl={"coef": 0.1, "adaptive": {"target": 0.5, "horizon": 10}},
        entropy={"name": "adaptive", "c0": 0.125},
    )
    whole, first = Controllers.of(settings), Controllers.of(settings)
    for step in range(3):
        for control in (whole, first):
            control.update(0.3 * step, 0.1 * step, 4)
    second = Controllers.of(settings)
    second.load_state(json.loads(json.dumps(first.state())))
    for step in range(3):
        measured = (0.4 * step, 0.15 * step)
        assert second.coefficients(*measured) == whole.coefficients(*measured)
        for control in (whole, second):
            control.update(*measured, 4)
    assert second.state() == whole.state()


def test_a_constant_is_the_configurations_also_when_a_run_goes_on() -> None:
    before = Controllers.of(algo(kl={"coef": 0.1}))
    after = Controllers.of(algo(kl={"coef": 0.2}))
    after.load_state(before.state())
    assert after.coefficients(0.0, math.inf).kl == 0.2


def test_what_had_no_controller_starts_from_the_configuration() -> None:
    """A run resumed with other settings; a checkpoint of before there were controllers."""
    plain = Controllers.of(algo())
    assert plain.state() == {"kl": None, "entropy": None}
    kl = {"coef": 0.05, "adaptive": {"target": 0.1, "horizon": 1000}}
    adaptive = Controllers.of(algo(kl=kl))
    for state in (plain.state(), {}):
        adaptive.load_state(state)
        assert adaptive.coefficients(0.0, 1.0).kl == 0.05


def test_a_horizon_of_a_few_samples_does_not_turn_the_sign() -> None:
    controller = KlController(AdaptiveKl(target=0.1, horizon=10.0), 1.0)
    controller.update(0.0, 256)
    assert controller.beta == pytest.approx(0.1)
