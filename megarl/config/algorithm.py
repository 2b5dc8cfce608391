"""What the settings of the algorithm imply together: contradictions, and parts without effect."""

from collections.abc import Iterator

from megarl.config.algo import (
    AdaptiveEntropy,
    AlgoSection,
    CorrectionSection,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    ProcessAdvantage,
    ReinforcePpAdvantage,
)
from megarl.config.policies import AspoPolicy, CispoPolicy, KlCovPolicy, MinirlPolicy
from megarl.config.schema import Config
from megarl.errors import Problem


def algorithm_problems(config: Config) -> Iterator[Problem]:
    algo = config.algo
    yield from _policy(algo)
    yield from _old_pass(algo)
    yield from _advantage(algo)
    yield from _steps(config)
    yield from _critic(config)
    yield from _kl(config)
    yield from _entropy(config)
    yield from _correction(algo)


def _policy(algo: AlgoSection) -> Iterator[Problem]:
    policy = algo.policy
    if isinstance(policy, AspoPolicy):
        yield from _without(
            policy.entropy_quantile is None and "eps_entropic" in policy.model_fields_set,
            *("algo.policy.eps_entropic", policy.eps_entropic, "algo.policy.entropy_quantile"),
        )
    if not isinstance(policy, CispoPolicy):
        return
    key = "algo.policy.w_max"
    if (policy.w_max is None) == (policy.w_eps_high is None):
        both = policy.w_max is not None
        found = "w_max and w_eps_high" if both else "neither w_max nor w_eps_high"
        yield Problem(key, found, "one of them: w_max is absolute, w_eps_high a distance from 1")
    if policy.w_eps_low is not None and "w_min" in policy.model_fields_set:
        found = "w_min and w_eps_low"
        accepted = "one of them: w_min is absolute, w_eps_low a distance from 1"
        yield Problem("algo.policy.w_min", found, accepted)
    low, high = policy.bounds
    if low >= high:
        yield Problem(key, f"weights from {low:g} to {high:g}", "a lower bound below the upper one")
    for name in ("eps_low", "eps_high"):
        value = getattr(policy, name)
        yield from _without(
            not policy.ppo_mask and value is not None,
            *(f"algo.policy.{name}", value, "algo.policy.ppo_mask"),
        )
        if policy.ppo_mask and value is None:
            yield Problem(
                f"algo.policy.{name}", "nothing", "a number > 0: ppo_mask compares with it"
            )


def _old_pass(algo: AlgoSection) -> Iterator[Problem]:
    """What is computed from the trainer's own pass before the update."""
    if algo.old_logprobs == "recompute":
        return
    key, accepted = "algo.old_logprobs", "recompute: {} needs the trainer's own log-probs"
    if algo.correction is not None:
        reason = "algo.correction (the ratio to the rollout's log-probs holds the mismatch already)"
        yield Problem(key, "rollout", accepted.format(reason))
    wanted = {
        "algo.policy.name=kl_cov": isinstance(algo.policy, KlCovPolicy),
        "algo.policy.entropy_quantile": isinstance(algo.policy, AspoPolicy)
        and algo.policy.entropy_quantile is not None,
        "algo.entropy.name=adaptive": isinstance(algo.entropy, AdaptiveEntropy),
    }
    for what, used in wanted.items():
        if used:
            yield Problem(key, "rollout", accepted.format(what))


def _advantage(algo: AlgoSection) -> Iterator[Problem]:
    advantage = algo.advantage
    if isinstance(advantage, GrpoAdvantage) and advantage.scale == "none":
        for name in ("ddof", "eps"):
            yield from _without(
                name in advantage.model_fields_set,
                *(f"algo.advantage.{name}", getattr(advantage, name)),
                "algo.advantage.scale other than none",
            )
    yield from _without(
        algo.overlong is not None and isinstance(advantage, ProcessAdvantage | GdpoAdvantage),
        *("algo.overlong", "a section"),
        f"another algo.advantage.name: {advantage.name} does not read the sum of rewards",
    )
    yield from _without(
        algo.overlong_filter and getattr(advantage, "bootstrap_truncated", False),
        *("algo.advantage.bootstrap_truncated", "true"),
        "algo.overlong_filter=false: it does not train truncated responses at all",
    )
    variant = getattr(advantage, "truncated_variant", None)
    yield from _without(
        algo.overlong_filter and variant == "include",
        *("algo.advantage.truncated_variant", variant),
        "algo.overlong_filter=false: it does not train truncated responses at all",
    )


def _steps(config: Config) -> Iterator[Problem]:
    """Rewards of reasoning steps come from a function of the user's."""
    builtin = config.run.mode == "rl" and not config.data.reward.startswith("import:")
    if builtin and isinstance(config.algo.advantage, ProcessAdvantage):
        accepted = (
            "import:package.module:function, one that gives steps (docs/rewards.md): "
            "algo.advantage.name=grpo_process needs a reward a step"
        )
        yield Problem("data.reward", config.data.reward, accepted)


def _critic(config: Config) -> Iterator[Problem]:
    lr, value, needs_values = config.critic.lr, config.algo.value, config.algo.needs_values
    if needs_values and config.run.mode == "rl" and lr is None:
        accepted = "a learning rate: algo.advantage.name=gae takes its values from a critic"
        yield Problem("critic.lr", "nothing", accepted)
    yield from _without(value is not None and lr is None, "algo.value", "a section", "critic.lr")


def _kl(config: Config) -> Iterator[Problem]:
    algo, kl = config.algo, config.algo.kl
    if kl is None:
        return
    if kl.adaptive is not None and config.run.mode == "rl":
        samples = config.data.prompts_per_step * config.data.samples_per_prompt
        if kl.adaptive.horizon <= samples:
            accepted = f"more than the {samples} samples of a step"
            yield Problem("algo.kl.adaptive.horizon", f"{kl.adaptive.horizon:g}", accepted)
    if config.run.steps <= kl.reference_every:
        found = f"{kl.reference_every}, which has no effect (run.steps={config.run.steps})"
        yield Problem("algo.kl.reference_every", found, "less than run.steps, or leave it out")
    if kl.coef == 0:
        accepted = "a number > 0, or no algo.kl: the reference policy costs a forward pass"
        yield Problem("algo.kl.coef", "0", accepted)
    token_rewards = isinstance(algo.advantage, GaeAdvantage | ReinforcePpAdvantage)
    if kl.place == "reward" and not token_rewards:
        accepted = f"loss: algo.advantage.name={algo.advantage.name} has no rewards of tokens"
        yield Problem("algo.kl.place", "reward", f"{accepted} (gae and reinforce_pp have)")
    weighted = kl.is_weight not in (None, "none")
    if kl.place == "reward":
        yield from _without(weighted, "algo.kl.is_weight", kl.is_weight, "algo.kl.place=loss")
    elif weighted and kl.type != "k3":
        accepted = (
            "none, or algo.kl.type=k3: k2 and k3+ become biased by it, k1 is k3 with noise added"
        )
        yield Problem("algo.kl.is_weight", f"{kl.is_weight} with {kl.type}", accepted)
    if kl.input_clamp is None and kl.type in ("k3", "k3+"):
        accepted = "a number > 0, e.g. 20: the exponential of a log-ratio overflows without"
        yield Problem("algo.kl.input_clamp", "null", accepted)


def _entropy(config: Config) -> Iterator[Problem]:
    entropy = config.algo.entropy
    if not isinstance(entropy, AdaptiveEntropy):
        return
    if config.run.mode == "sft":
        accepted = "constant: run.mode=sft has no pass before the update to measure the entropy in"
        yield Problem("algo.entropy.name", "adaptive", accepted)
    if entropy.c_min == entropy.c_max:
        yield Problem("algo.entropy.c_max", f"{entropy.c_max:g}", "a number above c_min")
    if not entropy.c_min <= entropy.c0 <= entropy.c_max:
        accepted = f"a number from c_min = {entropy.c_min:g} to c_max = {entropy.c_max:g}"
        yield Problem("algo.entropy.c0", f"{entropy.c0:g}", accepted)


def _correction(algo: AlgoSection) -> Iterator[Problem]:
    c, key = algo.correction, "algo.correction"
    if c is None:
        return
    drops = _filters(c) or (c.level is not None and c.mode == "mask")
    yield from _without(
        algo.aggregation.counts_kept and not drops,
        *("algo.aggregation.denominator_mask", "kept"),
        "an algo.correction that drops tokens (mode=mask, or a filter)",
    )
    if isinstance(algo.policy, MinirlPolicy) and c.level is not None:
        accepted = "null, which leaves the filters: minirl's weight holds the mismatch already"
        yield Problem(f"{key}.level", c.level, accepted)
    if c.level is None and not _filters(c):
        yield Problem(
            f"{key}.level", "null and no filter", "token, sequence, geometric or a filter"
        )
    if c.level is None:
        for name in ("mode", "low", "high"):
            given = name in c.model_fields_set and getattr(c, name) is not None
            yield from _without(given, f"{key}.{name}", getattr(c, name), f"{key}.level")
    elif c.mode == "mask" and c.low is None and c.high is None:
        yield Problem(
            f"{key}.high", "nothing", "low, high or both: mode=mask drops what is outside"
        )
    intervals = {f"{key}.high": (c.low or 0.0, c.high), f"{key}.geo_filter": c.geo_filter or (0, 1)}
    for name, (low, high) in intervals.items():
        if high is not None and low >= high:
            yield Problem(name, f"[{low:g}, {high:g}]", "a lower end below the upper one")


def _filters(c: CorrectionSection) -> bool:
    return any(x is not None for x in (c.geo_filter, c.k2_filter, c.k3_filter, c.veto))


def _without(wrong: bool, key: str, found: object, needed: str) -> Iterator[Problem]:
    """``key`` has no effect without ``needed``."""
    if wrong:
        yield Problem(key, f"{found}, which has no effect", f"leave it out, or set {needed}")
