"""Contradictions between the settings of an algorithm: each gives its one problem."""

import pytest

from megarl.config.load import load_config
from megarl.config.validate import validate
from megarl.errors import ConfigError

RUN = ["run.dir=/r", "run.steps=9", "model.hf=/m", "optim.lr=1", "data.prompts=/p"]
GSPO = "algo.policy.name=gspo"
MASK = "algo.correction={level: token, mode: mask, high: 2}"


def problems(overrides: list[str]) -> dict[str, str]:
    config = load_config([], RUN + overrides)
    try:
        validate(config, world_size=None, num_gpus=0, hf_config=None, check_paths=False)
    except ConfigError as e:
        return {p.key: f"{p.found} | {p.accepted}" for p in e.problems}
    return {}


@pytest.mark.parametrize(
    "overrides",
    [
        ["algo.policy={name: cispo, w_max: 5}"],
        ["algo.policy={name: cispo, w_eps_high: 4, w_eps_low: 0.5}"],
        ["algo.policy={name: cispo, w_max: 5, ppo_mask: true, eps_low: 0.2, eps_high: 0.3}"],
        ["algo.policy={name: aspo, entropy_quantile: 0.8, eps_entropic: 0.3}"],
        [GSPO, MASK, "algo.aggregation={name: token_mean, denominator_mask: kept}"],
        [GSPO, "algo.correction={geo_filter: [0.99, 1.01]}"],
        [GSPO, "algo.kl={coef: 0.1}"],
        [GSPO, "algo.kl={coef: 0.1, is_weight: self}"],
        [GSPO, "algo.kl={coef: 0.1, type: k1, place: reward}", "algo.advantage.name=reinforce_pp"],
        [GSPO, "algo.entropy={name: adaptive}", "algo.opsm={delta: 0.1}"],
        ["algo.policy.name=minirl", "algo.correction={veto: 1e-4}"],
        [GSPO, "algo.old_logprobs=rollout", "algo.opsm={delta: 0.1}"],
    ],
    ids=" ".join,
)
def test_what_goes_together_is_no_problem(overrides: list[str]) -> None:
    assert problems(overrides) == {}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        # CISPO: two conventions of its bounds, which are not to be mixed
        (["algo.policy={name: cispo}"], "algo.policy.w_max", "neither"),
        (["algo.policy={name: cispo, w_max: 5, w_eps_high: 4}"], "algo.policy.w_max", "one of"),
        (
            ["algo.policy={name: cispo, w_max: 5, w_min: 0.1, w_eps_low: 0.5}"],
            *("algo.policy.w_min", "one of"),
        ),
        (["algo.policy={name: cispo, w_max: 0.5, w_min: 2}"], "algo.policy.w_max", "below"),
        (["algo.policy={name: cispo, w_max: 5, eps_low: 0.2}"], "algo.policy.eps_low", "ppo_mask"),
        (
            ["algo.policy={name: cispo, w_max: 5, ppo_mask: true, eps_low: 0.2}"],
            *("algo.policy.eps_high", "ppo_mask compares"),
        ),
        (
            ["algo.policy={name: aspo, eps_entropic: 0.3}"],
            *("algo.policy.eps_entropic", "algo.policy.entropy_quantile"),
        ),
        # what needs the pass before the update
        ([GSPO, MASK, "algo.old_logprobs=rollout"], "algo.old_logprobs", "algo.correction"),
        (["algo.policy.name=kl_cov", "algo.old_logprobs=rollout"], "algo.old_logprobs", "kl_cov"),
        (
            ["algo.policy={name: aspo, entropy_quantile: 0.8}", "algo.old_logprobs=rollout"],
            *("algo.old_logprobs", "entropy_quantile"),
        ),
        (
            [GSPO, "algo.entropy={name: adaptive}", "algo.old_logprobs=rollout"],
            *("algo.old_logprobs", "adaptive"),
        ),
        # divergence
        (
            [GSPO, "algo.kl={coef: 0.1, adaptive: {target: 0.1, horizon: 200}}"],
            *("algo.kl.adaptive.horizon", "more than the 256 samples"),
        ),
        ([GSPO, "algo.kl={coef: 0}"], "algo.kl.coef", "costs a forward pass"),
        ([GSPO, "algo.kl={coef: 0.1, place: reward}"], "algo.kl.place", "no rewards of tokens"),
        (
            [GSPO, "algo.kl={coef: 0.1, type: k1, is_weight: old}"],
            *("algo.kl.is_weight", "old with k1 | none, or algo.kl.type=k3"),
        ),
        ([GSPO, "algo.kl={coef: 0.1, type: k2, is_weight: self}"], "algo.kl.is_weight", "biased"),
        ([GSPO, "algo.kl={coef: 0.1, type: k3+, is_weight: old}"], "algo.kl.is_weight", "biased"),
        (
            [
                *(GSPO, "algo.advantage.name=reinforce_pp"),
                "algo.kl={coef: 0.1, place: reward, is_weight: old}",
            ],
            *("algo.kl.is_weight", "has no effect"),
        ),
        ([GSPO, "algo.kl={coef: 0.1, input_clamp: null}"], "algo.kl.input_clamp", "overflows"),
        # entropy
        (
            [GSPO, "algo.entropy={name: adaptive, c0: 2}"],
            *("algo.entropy.c0", "from c_min = 0 to c_max = 1"),
        ),
        (
            [GSPO, "algo.entropy={name: adaptive, c_min: 1, c0: 1, c_max: 1}"],
            *("algo.entropy.c_max", "above c_min"),
        ),
        # corrections
        ([GSPO, "algo.correction={}"], "algo.correction.level", "null and no filter"),
        (
            [GSPO, "algo.correction={veto: 1e-4, high: 2}"],
            *("algo.correction.high", "algo.correction.level"),
        ),
        (
            [GSPO, "algo.correction={level: token, mode: mask}"],
            *("algo.correction.high", "mode=mask drops"),
        ),
        (
            [GSPO, "algo.correction={level: token, low: 3, high: 2}"],
            *("algo.correction.high", "[3, 2]"),
        ),
        (
            [GSPO, "algo.correction={geo_filter: [1.1, 0.9]}"],
            *("algo.correction.geo_filter", "[1.1, 0.9]"),
        ),
        (
            [
                *(GSPO, "algo.correction={level: token, high: 2}"),
                "algo.aggregation={name: token_mean, denominator_mask: kept}",
            ],
            *("algo.aggregation.denominator_mask", "drops tokens"),
        ),
        (["algo.policy.name=minirl", MASK], "algo.correction.level", "minirl's weight"),
        # advantages
        ([GSPO, "algo.advantage.name=grpo_process"], "data.reward", "a reward a step"),
        (
            [
                *(GSPO, "algo.overlong_filter=true", "critic.lr=1"),
                "algo.advantage={name: gae, bootstrap_truncated: true}",
            ],
            *("algo.advantage.bootstrap_truncated", "overlong_filter"),
        ),
        (
            [GSPO, "algo.advantage.name=gdpo", "algo.overlong={l_max: 9, l_cache: 4}"],
            *("algo.overlong", "gdpo does not read"),
        ),
        (
            [GSPO, "algo.advantage={name: grpo, scale: none, eps: 1e-4}"],
            *("algo.advantage.eps", "has no effect"),
        ),
        (
            [
                *(GSPO, "algo.overlong_filter=true"),
                "algo.advantage={name: grpo, truncated_variant: include}",
            ],
            *("algo.advantage.truncated_variant", "overlong_filter"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_contradiction_names_its_key(overrides: list[str], key: str, words: str) -> None:
    found = problems(overrides)
    assert list(found) == [key]
    assert words in found[key]


def test_all_contradictions_come_at_once() -> None:
    found = problems(
        [
            "algo.policy={name: cispo}",
            "algo.kl={coef: 0.1, place: reward}",
            "algo.correction={level: token, mode: mask}",
            "algo.old_logprobs=rollout",
        ]
    )
    assert set(found) == {
        *("algo.policy.w_max", "algo.kl.place", "algo.correction.high", "algo.old_logprobs")
    }
