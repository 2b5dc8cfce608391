"""Every setting of the algorithm changes the loss, a gradient or the advantages of some batch.

A setting that is parsed and then not passed on (slime#2247: the dual-clip bound) is invisible in
any test that was not written for it. Here the configuration's own sections are walked.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.algos.fused import KERNELS
from megarl.algos.presets import SURROGATES
from megarl.algos.surrogates import ppo_clip
from megarl.config.algo import AlgoSection
from megarl.config.fields import members, section
from tests.helpers.sensitivity import OUTSIDE, evaluate, perturbed, rich_batch, same, without_effect

CISPO_MASK = {"ppo_mask": True, "eps_low": 0.2, "eps_high": 0.3}
POLICIES: list[dict[str, Any]] = [
    {"name": "gspo"},
    {"name": "gspo", "eps_low": 0.2, "eps_high": 0.3},
    {"name": "gspo_token"},
    {"name": "ppo_clip", "dual_clip": 3.0},
    {"name": "sapo"},
    {"name": "cispo", "w_min": 0.5, "w_max": 5.0, **CISPO_MASK},
    {"name": "cispo", "w_eps_low": 0.2, "w_eps_high": 0.3, **CISPO_MASK},
    {"name": "aspo", "entropy_quantile": 0.8},
    {"name": "minirl"},
    {"name": "gmpo"},
    {"name": "kl_cov", "ratio": 0.02},
    {"name": "reinforce"},
    {"name": "sft"},
]
GROUPED = {"singleton": "zero", "truncated_variant": "exclude"}
ADVANTAGES: list[dict[str, Any]] = [
    *({"name": "grpo", "scale": scale, **GROUPED} for scale in ("group", "batch")),
    {"name": "grpo_loo", **GROUPED},
    *({"name": name, **GROUPED} for name in ("dr_grpo", "rloo", "opo", "gpg")),
    {"name": "grpo_process"},
    {"name": "gdpo", "weights": (1.0, 0.5)},
    {"name": "reinforce_pp"},
    {"name": "reinforce_pp_baseline"},
    {"name": "gae", "gamma": 0.99, "lam": 0.95},
    {"name": "gae", "gamma": 1.0, "lam": 1.0, "bootstrap_truncated": True, "whiten": False},
]
MASK = {"level": "token", "mode": "mask", "low": 0.5, "high": 2.0}
AGGREGATIONS: list[dict[str, Any]] = [
    {"name": "token_mean"},
    {"name": "seq_mean_token_mean"},
    {"name": "seq_mean_token_sum", "denominator_mask": "kept"},
    {"name": "constant", "constant": 16.0},
    {"name": "group_token_mean"},
]
KLS: list[dict[str, Any]] = [
    *({"type": kind, "coef": 0.1} for kind in ("k1", "k2", "k3", "k3+")),
    {"type": "k3", "coef": 0.1, "is_weight": "self"},
    {"type": "k3", "coef": 0.1, "is_weight": "none", "input_clamp": 5.0},
    {"type": "k2", "coef": 0.1, "adaptive": {"target": 0.5, "horizon": 1000.0}},
]
ENTROPIES: list[dict[str, Any]] = [
    {"name": "constant", "coef": 0.01},
    {"name": "adaptive"},
    {"name": "adaptive", "c0": 0.1, "c_min": 0.02, "c_max": 0.3, "delta": 0.05},
]
FILTERS = {"geo_filter": (0.9, 1.2), "k2_filter": 0.5, "k3_filter": 0.05, "veto": 1e-3}
CORRECTIONS: list[dict[str, Any]] = [
    *({"level": level, "low": 0.5, "high": 2.0} for level in ("token", "sequence", "geometric")),
    MASK,
    *({name: value} for name, value in FILTERS.items()),
    {"level": "sequence", "high": 2.0, "batch_normalize": True},
]
PPO: dict[str, Any] = {"policy": {"name": "ppo_clip"}, "aggregation": {"name": "token_mean"}}


def sections() -> Iterator[tuple[str, dict[str, Any]]]:
    """(section to perturb, settings in which every one of its options is on)."""
    yield from (("policy", {"policy": policy}) for policy in POLICIES)
    yield from (("advantage", {"advantage": advantage}) for advantage in ADVANTAGES)
    yield from (("aggregation", {"aggregation": x, "correction": MASK}) for x in AGGREGATIONS)
    yield from (("kl", {"kl": kl}) for kl in KLS)
    yield from (("entropy", {"entropy": entropy}) for entropy in ENTROPIES)
    yield from (("correction", {"correction": correction}) for correction in CORRECTIONS)
    yield "value", {"advantage": {"name": "gae"}, "value": {"clip": 0.2}}
    penalty = {"type": "k1", "coef": 0.1, "place": "reward"}
    yield "kl", {"advantage": {"name": "reinforce_pp", "gamma": 0.9}, "kl": penalty}
    for against in ("rollout", "old"):
        yield "opsm", {"opsm": {"delta": 0.1, "against": against}}
    yield "overlong", {"overlong": {"l_max": 40, "l_cache": 20}}
    for one in ("overlong_filter", "minibatches", "old_logprobs"):
        yield one, {"overlong_filter": True, "minibatches": 2}


@pytest.mark.parametrize(("name", "settings"), list(sections()), ids=str)
def test_every_setting_changes_the_result(name: str, settings: dict[str, Any]) -> None:
    algo = AlgoSection.model_validate(PPO | settings)
    assert without_effect(algo, under=[name]) == []


def test_the_sections_above_are_all_there_are_with_all_their_settings() -> None:
    """A new objective, estimator, option or section is missing here until it is tested."""
    unions = {"policy": POLICIES, "advantage": ADVANTAGES, "aggregation": AGGREGATIONS}
    for field, tested in {**unions, "entropy": ENTROPIES}.items():
        models = members(AlgoSection.model_fields[field])
        assert {t["name"] for t in tested} == set(models)
        for name, model in models.items():
            options = {k for k, f in model.model_fields.items() if f.default is None}
            assert options <= {k for t in tested if t["name"] == name for k in t}
    for field, tested in {"kl": KLS, "correction": CORRECTIONS}.items():
        model = section(AlgoSection.model_fields[field])
        assert model is not None
        options = {k for k, f in model.model_fields.items() if f.default is None}
        assert options <= {k for t in tested for k in t}
    assert {s for s, _ in sections()} | set(OUTSIDE) == set(AlgoSection.model_fields)


def test_a_setting_that_is_not_passed_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: an objective that forgets its dual clip, in either form."""
    kernel = KERNELS["ppo_clip"]
    without = replace(kernel, parameters=lambda p: kernel.parameters(p) | {"cap": 3.0})
    monkeypatch.setitem(KERNELS, "ppo_clip", without)
    forgetful = replace(
        SURROGATES["ppo_clip"],
        compute=lambda row, policy: ppo_clip(row, policy.model_copy(update={"dual_clip": 3.0})),
    )
    monkeypatch.setitem(SURROGATES, "ppo_clip", forgetful)
    algo = AlgoSection.model_validate({"policy": {"name": "ppo_clip", "dual_clip": 2.0}})
    assert without_effect(algo, under=["policy"]) == ["policy.dual_clip"]


def test_the_rich_batch_is_evaluated_alike_every_time_and_is_finite() -> None:
    algo = AlgoSection.model_validate(PPO)
    one, two = evaluate(algo), evaluate(algo, rich_batch(algo))
    assert same(one, two) and len(one["loss"]) == 4
    assert all(np.isfinite(values).all() for values in one.values())
    keys = [key for key, _ in perturbed(algo)]
    assert {"policy.eps_low", "policy.eps_high", "advantage.eps", "minibatches"} <= set(keys)
    assert "policy.dual_clip" not in keys  # off
