"""The policy loss token by token in float64, written out from the formulas of docs/objectives.md.

It shares no code with the package but the names of the op's outputs. Every number comes with the
sum of the sizes of its terms: what rounding is relative to, where terms cancel.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

LIMIT = 20.0
WHOLE_SEQUENCES = ("gspo", "gspo_token", "gmpo")
REALS = (
    *("logprobs", "old_logprobs", "advantages", "weight", "rollout_logprobs", "ref_logprobs"),
    *("correction", "entropy"),
)
READ_ALWAYS = ("logprobs", "old_logprobs", "advantages", "weight")


class Sums:
    """Named sums, and the sizes of what was added."""

    def __init__(self) -> None:
        self.value: dict[Any, float] = defaultdict(float)
        self.size: dict[Any, float] = defaultdict(float)

    def add(self, name: Any, *terms: float) -> None:
        for term in terms:
            self.value[name] += term
            self.size[name] += abs(term)


@dataclass
class Plain:
    """``grad`` by token, ``sums`` by (name, sequence), ``totals`` by name; ``dead``: sequences."""

    grad: Sums
    grad_entropy: list[float]
    sums: Sums
    totals: Sums
    ratio_min: float
    ratio_max: float
    dead: set[int]


@dataclass
class Token:
    """What is known of one used token. ``coef``: of the policy term; ``weight``: of the others."""

    lp: float
    a: float
    d: float
    gap: float
    coef: float
    weight: float
    x: float  # log-ratio of the reference policy
    entropy: float
    selected: bool

    @property
    def inside(self) -> bool:
        return abs(self.d) <= LIMIT

    @property
    def near(self) -> float:
        return min(max(self.d, -LIMIT), LIMIT)

    @property
    def r(self) -> float:
        return math.exp(self.near)


@dataclass
class Sequence:
    """``z``: mean log-ratio, of gmpo the clipped one; P and Q: sums of coef A by A's sign."""

    n: int
    z: float
    s: float
    inside: bool
    positive: float
    negative: float


def plain(row: dict[str, np.ndarray | None], terms: Any) -> Plain:
    """``row``: the fields of ``PolicyRow`` in numpy; ``terms``: a ``PolicyTerms``."""
    p = defaultdict(float, terms.parameters)
    bounds = row["cu_seqlens"].tolist()
    out = Plain(Sums(), [0.0] * bounds[-1], Sums(), Sums(), math.inf, -math.inf, set())
    for s, (begin, end) in enumerate(pairwise(bounds)):
        tokens, dropped = _used(row, terms, p, begin, end)
        out.totals.add("dropped", dropped)
        out.sums.add(("dropped", s), dropped)
        _sum_sequence(out.sums, s, tokens, terms, p)
        if dropped and terms.objective in WHOLE_SEQUENCES:
            out.dead.add(s)
            continue
        _sequence(out, tokens, _kept(tokens, terms, p), terms, p)
    return out


def _used(row: Any, terms: Any, p: Any, begin: int, end: int) -> tuple[dict[int, Token], int]:
    read = list(READ_ALWAYS)
    corrected = row["correction"] is not None
    reads_rollout = terms.objective == "minirl" or terms.opsm == "rollout" or corrected
    read += ["rollout_logprobs"] * reads_rollout + ["correction"] * corrected
    read += ["ref_logprobs"] * bool(terms.kl_type) + ["entropy"] * bool(p["entropy_coef"])
    tokens, dropped = {}, 0
    for t in range(begin, end):
        if not row["mask"][t]:
            continue
        if not all(math.isfinite(row[name][t]) for name in read):
            dropped += 1
            continue
        lp, w = float(row["logprobs"][t]), float(row["weight"][t])
        tokens[t] = Token(
            lp=lp,
            a=float(row["advantages"][t]),
            d=lp - float(row["old_logprobs"][t]),
            gap=lp - float(row["rollout_logprobs"][t]) if reads_rollout else 0.0,
            coef=w * (float(row["correction"][t]) if corrected else 1.0),
            weight=w,
            x=float(row["ref_logprobs"][t]) - lp if terms.kl_type else 0.0,
            entropy=0.0 if row["entropy"] is None else float(row["entropy"][t]),
            selected=row["selected"] is not None and bool(row["selected"][t]),
        )
    return tokens, dropped


def _gap(token: Token, terms: Any) -> float:
    return token.d if terms.opsm == "old" else token.gap


def _kept(tokens: dict[int, Token], terms: Any, p: Any) -> bool:
    """Off-policy sequence masking: A < 0 and mean(log mu - lp) > delta."""
    if not terms.opsm or not tokens:
        return True
    lost = -sum(_gap(t, terms) for t in tokens.values()) / len(tokens)
    return not (sum(t.a for t in tokens.values()) < 0 and lost > p["opsm_delta"])


def _gmpo_clipped(t: Token, p: Any) -> float:
    if t.a == 0:
        return 0.0
    return min(t.d, p["log_high"]) if t.a > 0 else max(t.d, p["log_low"])


def _sum_sequence(sums: Sums, s: int, tokens: dict[int, Token], terms: Any, p: Any) -> None:
    for t in tokens.values():
        sums.add(("count", s), 1)
        sums.add(("log_ratio", s), t.d)
        sums.add(("positive" if t.a > 0 else "negative", s), t.coef * t.a)
        if terms.opsm:
            sums.add(("gap", s), _gap(t, terms))
            sums.add(("advantage", s), t.a)
        if terms.objective == "gmpo":
            sums.add(("clipped_log_ratio", s), _gmpo_clipped(t, p))
        if terms.all_metrics:
            sums.add(("square", s), t.near**2)
            sums.add(("distance", s), abs(math.expm1(t.near)))


def _sequence(out: Plain, tokens: dict[int, Token], kept: bool, terms: Any, p: Any) -> None:
    n = max(len(tokens), 1)
    if not kept:
        for t in tokens.values():
            t.coef = 0.0
    clipped = terms.objective == "gmpo"
    z = sum(_gmpo_clipped(t, p) if clipped else t.d for t in tokens.values()) / n
    whole = Sequence(
        n=n,
        z=z,
        s=math.exp(min(max(z, -LIMIT), LIMIT)),
        inside=abs(z) <= LIMIT,
        positive=sum(t.coef * t.a for t in tokens.values() if t.a > 0),
        negative=sum(t.coef * t.a for t in tokens.values() if t.a < 0),
    )
    for at, t in tokens.items():
        loss, grads, mean, flags = OBJECTIVES[terms.objective](t, p, whole)
        out.totals.add("pg_loss", *(t.coef * part for part in loss))
        out.grad.add(at, *grads)
        for k, flag in enumerate(flags):
            out.totals.add(f"flag{k}", float(flag))
        _add_divergence(out, at, t, terms, p)
        if p["entropy_coef"]:
            out.grad_entropy[at] = -p["entropy_coef"] * t.weight
            out.totals.add("entropy_loss", t.weight * t.entropy)
        out.totals.add("tokens", 1)
        out.totals.add("approx_kl_k1", -t.near)
        if terms.all_metrics:
            out.totals.add("mean", mean)
            _add_ratios(out, t)


def _add_ratios(out: Plain, t: Token) -> None:
    out.totals.add("entropy", t.entropy)
    out.totals.add("approx_kl_k3", math.expm1(t.near) - t.near)
    out.totals.add("ratio", t.r)
    out.totals.add("ratio_sq", t.r**2)
    out.totals.add("ratio_clamped", float(not t.inside))
    out.ratio_min, out.ratio_max = min(out.ratio_min, t.r), max(out.ratio_max, t.r)


def _add_divergence(out: Plain, at: int, t: Token, terms: Any, p: Any) -> None:
    if not terms.kl_type:
        return
    bound = p["kl_input_clamp"]
    x = min(max(t.x, -bound), bound)
    k3 = math.expm1(x) - x if abs(x) > 1e-2 else x * x / 2 + x**3 / 6 + x**4 / 24 + x**5 / 120
    value, slope = {
        "k1": (-x, 1.0),
        "k2": (x * x / 2, -x),
        "k3": (k3, -math.expm1(x)),
        "k3+": (k3, -x),
    }[terms.kl_type]
    held = min(max(value, -p["kl_output_clamp"]), p["kl_output_clamp"])
    if held != value:
        slope = 0.0
    w = t.r if terms.kl_weight == "old" else 1.0
    # (w k)' = w k' + w' k; w' = w where w moves at all
    moves = {"none": False, "self": True, "old": t.inside}[terms.kl_weight]
    parts = [w * slope, w * held if moves else 0.0]
    if abs(t.x) <= bound:
        out.grad.add(at, *(p["kl_coef"] * t.weight * part for part in parts))
    out.totals.add("kl", w * held)
    out.totals.add("kl_loss", t.weight * w * held)


# --- l as terms, d(sum coef l)/dlp as terms, mean, flags ------------------------------------------

Result = tuple[list[float], list[float], float, tuple[bool, ...]]


def _beyond(t: Token, r: float, low: float, high: float) -> tuple[bool, bool]:
    return t.a > 0 and r > high, t.a < 0 and r < low


def _reinforce(t: Token, p: Any, s: Sequence) -> Result:
    return [-t.a * t.lp], [-t.a * t.coef], 0.0, ()


def _sft(t: Token, p: Any, s: Sequence) -> Result:
    return [-t.lp], [-t.coef], 0.0, ()


def _ppo_clip(t: Token, p: Any, s: Sequence) -> Result:
    over, under = _beyond(t, t.r, p["low"], p["high"])
    dual = t.a < 0 and t.r > p["cap"]
    loss = max(-t.a * t.r, -t.a * min(max(t.r, p["low"]), p["high"]))
    if t.a < 0:
        loss = min(loss, -t.a * p["cap"])
    moves = t.inside and not (over or under or dual)
    return [loss], [-t.a * t.r * t.coef if moves else 0.0], 0.0, (over, under, dual)


def _cispo(t: Token, p: Any, s: Sequence) -> Result:
    over, under = _beyond(t, t.r, p["low"], p["high"])
    w = 0.0 if over or under else min(max(t.r, p["floor"]), p["cap"])
    flags = (t.r > p["cap"], t.r < p["floor"], over, under)
    return [-w * t.a * t.lp], [-w * t.a * t.coef], -w * t.a, flags


def _sapo(t: Token, p: Any, s: Sequence) -> Result:
    tau = p["tau_pos"] if t.a > 0 else p["tau_neg"]
    x = tau * (t.r - 1)
    e = math.exp(-abs(x))
    gate = 4 * e / (1 + e) ** 2
    sigmoid = 1 / (1 + e) if x >= 0 else e / (1 + e)
    grad = -t.a * t.r * gate * t.coef if t.inside else 0.0
    return [-4 / tau * sigmoid * t.a], [grad], gate, (gate < 0.5,)


def _aspo(t: Token, p: Any, s: Sequence) -> Result:
    low = p["wide_low"] if t.selected else p["low"]
    high = p["wide_high"] if t.selected else p["high"]
    over, under = _beyond(t, t.r, low, high)
    w = 1 / min(t.r, high) if t.a > 0 else max(t.r, low)
    w = min(w, p["cap"])
    flags = (over, under, t.a < 0 and t.r > p["cap"], t.a > 0 and 1 / t.r > p["cap"])
    return [-t.a * w], [0.0 if over or under else -t.a * w * t.coef], 0.0, flags


def _minirl(t: Token, p: Any, s: Sequence) -> Result:
    over, under = _beyond(t, t.r, p["low"], p["high"])
    behaviour = math.exp(min(max(t.gap, -LIMIT), LIMIT))
    w = 0.0 if over or under else min(behaviour, p["cap"])
    flags = (over, under, behaviour > p["cap"])
    return [-w * t.a * t.lp], [-w * t.a * t.coef], -w * t.a, flags


def _kl_cov(t: Token, p: Any, s: Sequence) -> Result:
    penalty = p["penalty"] if t.selected else 0.0
    sign = (t.d > 0) - (t.d < 0)
    grads = [-t.a * t.r * t.coef if t.inside else 0.0, penalty * sign * t.coef]
    return [-t.a * t.r, penalty * abs(t.d)], grads, 0.0, (t.selected,)


def _gspo(t: Token, p: Any, s: Sequence) -> Result:
    over, under = _beyond(t, s.z, p["log_low"], p["log_high"])
    loss = -t.a * (min(s.s, p["high"]) if t.a > 0 else max(s.s, p["low"]))
    pulls = [s.positive if s.z <= p["log_high"] else 0.0, s.negative if s.z >= p["log_low"] else 0]
    grads = [-s.s * pull / s.n if s.inside else 0.0 for pull in pulls]
    return [loss], grads, 0.0, (over, under)


def _gspo_token(t: Token, p: Any, s: Sequence) -> Result:
    loss, _, _, flags = _gspo(t, p, s)
    return loss, [-t.a * s.s * t.coef if s.inside and not any(flags) else 0.0], 0.0, flags


def _gmpo(t: Token, p: Any, s: Sequence) -> Result:
    flags = _beyond(t, t.d, p["log_low"], p["log_high"])
    moves = s.inside and t.a != 0 and not any(flags)
    grads = [-s.s * pull / s.n if moves else 0.0 for pull in (s.positive, s.negative)]
    return [-t.a * s.s], grads, 0.0, flags


OBJECTIVES = {
    "reinforce": _reinforce,
    "sft": _sft,
    "ppo_clip": _ppo_clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "aspo": _aspo,
    "minirl": _minirl,
    "kl_cov": _kl_cov,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "gmpo": _gmpo,
}
