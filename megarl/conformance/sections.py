"""A case's ``config`` -> sections of our configuration.

The format's keys are listed here; any other one makes the case unsupported, and so does a value
that our configuration refuses. A key that the chosen algorithm has no use for is accepted where it
could not change the result.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from megarl.config.algo import (
    Advantage,
    Aggregation,
    AlgoSection,
    ConstantEntropy,
    CorrectionSection,
    KlSection,
    OpsmSection,
)
from megarl.config.fields import nullable
from megarl.config.policies import AspoPolicy, MinirlPolicy, Policy
from megarl.config.section import Section
from megarl.conformance.cases import Unsupported

Config = Mapping[str, Any]
S = TypeVar("S", bound=Section)

ADVANTAGE = ("ddof", "eps", "scale", "singleton", "truncated_variant", "f_norm")
POLICY = (
    *("eps_low", "eps_high", "dual_clip", "w_min", "w_max", "ppo_mask"),
    *("tau_pos", "tau_neg", "tis_max"),
)
AGGREGATION = ("seq_denominator", "constant", "denominator_mask")
KL_ESTIMATE = ("type", "input_clamp", "output_clamp", "is_weight")
CORRECTION = ("level", "mode", "low", "high", "geo_filter", "veto", "batch_normalize")
OPSM = ("delta", "against")
LOSS = ("algo", *POLICY, "agg", "kl", "entropy_coef", "rollout_correction", "opsm")


def _by_name(union: Any) -> dict[str, type[Section]]:
    return {c.model_fields["name"].default: c for c in get_args(get_args(union)[0])}


ADVANTAGES, POLICIES, AGGREGATIONS = map(_by_name, (Advantage, Policy, Aggregation))
# Caps that are there in a run and only where a case names them.
UNCAPPED: dict[type[Section], tuple[str, ...]] = {
    AspoPolicy: ("dual_clip",),
    MinirlPolicy: ("tis_max",),
}
# What the format knows of each.
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "grpo_loo", "opo", "gpg")
ALGOS = ("reinforce", "ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "aspo", "minirl", "gmpo")


def check_keys(config: Config, accepted: Iterable[str], where: str = "config") -> None:
    accepted = tuple(accepted)
    for key in config:
        if key not in accepted:
            known = f"known here: {', '.join(accepted)}" if accepted else "none is known here"
            raise Unsupported(f"{where}.{key} is unknown; {known}")


# What a run refuses as pointless, a formula still has a value for.
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number")


def build(cls: type[S], where: str = "config", **values: Any) -> S:
    """A section; null is what is not named. Numbers outside the bounds of a run are accepted."""
    given = {k: v for k, v in values.items() if v is not None or _nullable(cls, k)}
    try:
        return cls(**given)
    except ValidationError as e:
        errors = e.errors()
        if all(error["type"] in _BOUNDS for error in errors):
            numbers = {k: float(v) if v in _INFINITE else v for k, v in given.items()}
            return cls.model_construct(None, **numbers)
        first = errors[0]
        at = ".".join(map(str, (where, *first["loc"])))
        raise Unsupported(f"{at}: {first['msg']}, not {first.get('input')!r}") from None


def advantage(config: Config) -> Section:
    """Of kind seq_advantage."""
    check_keys(config, ("estimator", *ADVANTAGE))
    cls = _named(ADVANTAGES, ESTIMATORS, config.get("estimator"), "config.estimator")
    # dr_grpo, rloo, opo and gpg divide by no deviation, and only gpg has a normaliser.
    unused = {"ddof": any_value, "eps": any_value, "f_norm": any_value, "scale": _undivided}
    return build(cls, **_of_class(cls, _without(config, "estimator"), unused, "config"))


def policy(config: Config) -> Section:
    """From the keys of ``config`` that are a policy's."""
    cls = _named(POLICIES, ALGOS, config.get("algo"), "config.algo")
    own = {key: config[key] for key in POLICY if config.get(key) is not None}
    for key in UNCAPPED.get(cls, ()):
        own.setdefault(key, float("inf"))
    if own.get("ppo_mask"):
        for key in ("eps_low", "eps_high"):
            if key not in own:
                raise Unsupported(f"config.{key} is missing: ppo_mask compares with it")
    return build(cls, **_of_class(cls, own, {}, "config"))


def aggregation(config: Config) -> Section:
    where = "config.agg"
    check_keys(config, ("mode", *AGGREGATION), where)
    cls = _named(AGGREGATIONS, AGGREGATIONS, config.get("mode"), f"{where}.mode")
    unused = dict.fromkeys(AGGREGATION, any_value)
    return build(cls, where, **_of_class(cls, _without(config, "mode"), unused, where))


def kl_estimate(config: Config, coef: float = 1.0, where: str = "config") -> KlSection:
    """No clamp and no weight where the case names none; ours has both by default."""
    given = {key: config.get(key) for key in KL_ESTIMATE}
    if given["type"] is None:
        raise Unsupported(f"{where}.type is missing")
    return build(
        KlSection, where, coef=coef, **{**given, "is_weight": given["is_weight"] or "none"}
    )


def correction(config: Config, where: str = "config") -> CorrectionSection:
    check_keys(config, CORRECTION, where)
    return build(CorrectionSection, where, **config)


def algo(config: Config) -> AlgoSection:
    """Of a loss, in whole."""
    check_keys(config, LOSS)
    if config.get("agg") is None:
        raise Unsupported("config.agg is missing")
    sections: dict[str, Any] = {
        "policy": policy(config),
        "aggregation": aggregation(config["agg"]),
    }
    if (kl := config.get("kl")) is not None:
        check_keys(kl, (*KL_ESTIMATE, "coef"), "config.kl")
        sections["kl"] = kl_estimate(kl, kl.get("coef"), "config.kl")
    if (coef := config.get("entropy_coef")) not in (None, 0):
        sections["entropy"] = build(ConstantEntropy, "config.entropy_coef", coef=coef)
    if (given := config.get("rollout_correction")) is not None:
        sections["correction"] = correction(given, "config.rollout_correction")
    if (given := config.get("opsm")) is not None:
        check_keys(given, OPSM, "config.opsm")
        sections["opsm"] = build(OpsmSection, "config.opsm", **given)
    return build(AlgoSection, **sections)


_INFINITE = ("inf", "-inf", float("inf"), float("-inf"))


def _nullable(cls: type[Section], name: str) -> bool:
    return name in cls.model_fields and nullable(cls.model_fields[name])


def any_value(value: Any) -> bool:
    return True


def _undivided(value: Any) -> bool:
    return value in ("group", "none")


def _named(
    classes: Mapping[str, type[Section]], known: Iterable[str], name: Any, where: str
) -> type[Section]:
    if name not in tuple(known):
        raise Unsupported(f"{where} is {name!r}; known: {', '.join(known)}")
    return classes[name]


def _without(config: Config, key: str) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k != key}


def _of_class(
    cls: type[Section], given: Config, unused: Mapping[str, Callable[[Any], bool]], where: str
) -> dict[str, Any]:
    """``given`` without what ``cls`` has no use for: null, or a value that ``unused`` lets pass."""
    name = cls.model_fields["name"].default
    out = {}
    for key, value in given.items():
        if key in cls.model_fields:
            out[key] = value
        elif value is not None and not unused.get(key, _none)(value):
            raise Unsupported(f"{where}.{key}={value!r} is not known of {name}")
    return out


def _none(value: Any) -> bool:
    return False
