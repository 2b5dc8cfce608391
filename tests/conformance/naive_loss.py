"""Losses from their definitions: one scalar, token by token, differentiated by autograd with what
is held constant detached. Shares no code with megarl.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.conformance.naive import Config, clamp, mean, rollout_correction

WHOLE_SEQUENCES = ("gspo", "gspo_token", "gmpo")
Token = tuple[int, int]


def number(x: float) -> Tensor:
    return torch.tensor(float(x), dtype=torch.float64)


def ratio_of(d: Tensor) -> Tensor:
    return d.clamp(-20, 20).exp()


def ends(c: Config) -> tuple[float, float]:
    return 1 - c.get("eps_low", 0.2), 1 + c.get("eps_high", 0.2)


def outside(c: Config, a: float, r: float) -> bool:
    low, high = ends(c)
    return (a > 0 and r > high) or (a < 0 and r < low)


# A token's loss. c: config, a: advantage, s: the sequence's ratio as (gspo's or gmpo's) tensor.


def reinforce(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    return -a * lp


def ppo_clip(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    r = ratio_of(lp - lo)
    found = torch.maximum(-a * r, -a * r.clamp(*ends(c)))
    if c.get("dual_clip") and a < 0:
        found = torch.minimum(found, number(-a * c["dual_clip"]))
    return found


def gspo(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    low, high = ends(c)
    return -a * (s.clamp(max=high) if a > 0 else s.clamp(min=low))


def gspo_token(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    path = (lp - lp.detach()).exp() if abs(math.log(float(s.detach()))) < 20 else number(1)
    return gspo(c, a, lp, lo, lr, s.detach() * path)


def cispo(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    r = ratio_of(lp - lo).detach()
    w = r.clamp(c.get("w_min", 0.0), c.get("w_max", math.inf))
    if c.get("ppo_mask") and outside(c, a, float(r)):
        w = number(0)
    return -w * a * lp


def sapo(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    tau = c["tau_pos"] if a > 0 else c["tau_neg"]
    return -(4 / tau) * torch.sigmoid(tau * (ratio_of(lp - lo) - 1)) * a


def aspo(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    r = float(ratio_of(lp - lo).detach())
    low, high = ends(c)
    w = min(1 / min(r, high), c["dual_clip"]) if a > 0 else min(max(r, low), c["dual_clip"])
    path = number(1) if outside(c, a, r) else (lp - lp.detach()).exp()
    return -a * w * path


def minirl(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    if outside(c, a, float(ratio_of(lp - lo).detach())):
        return 0 * lp
    return -min(math.exp(clamp(float(lp.detach()) - lr)), c["tis_max"]) * a * lp


def gmpo(c: Config, a: float, lp: Tensor, lo: float, lr: float, s: Tensor) -> Tensor:
    return -a * s


ALGOS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (reinforce, ppo_clip, gspo, gspo_token, cispo, sapo, aspo, minirl, gmpo)
}


def sequence_ratio(c: Config, d: Sequence[Tensor], a: Sequence[float]) -> Tensor:
    if c["algo"] == "gmpo":
        low, high = -c["eps_low"], c["eps_high"]
        d = [
            x.clamp(max=high) if y > 0 else x.clamp(min=low) if y < 0 else 0 * x
            for x, y in zip(d, a, strict=True)
        ]
    return ratio_of(torch.stack(list(d)).mean()) if d else number(1)


def kl(c: Config, lp: Tensor, lf: float, lo: float) -> Tensor:
    x = lf - lp
    limit = c.get("input_clamp")
    frozen = limit is not None and abs(float(x.detach())) > limit
    if limit is not None:
        x = x.clamp(-limit, limit)
    k2, k3 = x * x / 2, torch.expm1(x) - x
    value = {"k1": -x, "k2": k2, "k3": k3, "k3+": k3.detach() + k2 - k2.detach()}[c["type"]]
    if c.get("output_clamp") is not None:
        value = value.clamp(-c["output_clamp"], c["output_clamp"])
    w = number(1)
    if c.get("is_weight") == "old":
        w = ratio_of(lp - lo)
    elif c.get("is_weight") == "self":
        w = (lp - lp.detach()).exp()
    return (w * value).detach() + 0 * lp if frozen else w * value


def aggregation_weights(agg: Config, counts: Sequence[int], groups: Sequence[int]) -> list[float]:
    nonempty = sum(n > 0 for n in counts)
    sequences = max(1, len(counts) if agg.get("seq_denominator") == "all" else nonempty)
    total = max(1, sum(counts))
    per_group = {g: sum(n for n, h in zip(counts, groups, strict=True) if g == h) for g in groups}
    prompts = max(1, sum(n > 0 for n in per_group.values()))
    of: dict[str, Callable[[int, int], float]] = {
        "token_mean": lambda n, g: 1 / total,
        "seq_mean_token_mean": lambda n, g: 1 / (sequences * max(n, 1)),
        "seq_mean_token_sum": lambda n, g: 1 / sequences,
        "constant": lambda n, g: 1 / (len(counts) * agg["constant"]),
        "group_token_mean": lambda n, g: 1 / (prompts * max(1, per_group[g])),
    }
    return [of[agg["mode"]](n, g) for n, g in zip(counts, groups, strict=True)]


class Loss:
    """``terms[i, t]``: what token t of sequence i adds to the loss, a tensor with gradient."""

    def __init__(self, config: Config, inputs: Mapping[str, Any]) -> None:
        self.config, self.inputs = config, inputs
        self.mask = inputs["mask"]
        self.lp = [[number(x).requires_grad_() for x in part] for part in inputs["logp"]]
        self.correction = None
        if "rollout_correction" in config:
            self.correction = rollout_correction(config["rollout_correction"], inputs)
        self.trained = {(i, t) for i, part in enumerate(self.mask) for t, m in enumerate(part) if m}
        self.bad = {token for token in self.trained if not self._finite(*token)}
        self.used = self.trained - self.bad
        if config["algo"] in WHOLE_SEQUENCES:
            spoilt = {i for i, _ in self.bad}
            self.used = {token for token in self.used if token[0] not in spoilt}
        self.weight = self._weights()
        self.policy = {token: self._policy(*token) for token in self.used}
        self.opsm = self._opsm()
        self.terms, self.pg, self.kl, self.entropy = {}, 0.0, 0.0, 0.0
        for token in sorted(self.used):
            self.terms[token] = self._term(*token)

    def _reads_rollout(self) -> bool:
        opsm = self.config.get("opsm", {"against": "old"})
        against = opsm.get("against", "rollout") == "rollout"
        return self.config["algo"] == "minirl" or self.correction is not None or against

    def _finite(self, i: int, t: int) -> bool:
        names = ["logp", "logp_old", "advantages"]
        names += ["logp_rollout"] * self._reads_rollout() + ["logp_ref"] * ("kl" in self.config)
        return all(math.isfinite(self.inputs[name][i][t]) for name in names)

    def _weights(self) -> list[list[float]]:
        agg, counted = self.config["agg"], self.mask
        if agg.get("denominator_mask") == "kept" and self.correction:
            counted = self.correction["keep"]
        groups = self.inputs.get("groups", [0] * len(self.mask))
        found = aggregation_weights(agg, [sum(part) for part in counted], groups)
        return [[w * m for m in part] for w, part in zip(found, counted, strict=True)]

    def _tokens(self, i: int) -> list[int]:
        return sorted(t for j, t in self.used if j == i)

    def _policy(self, i: int, t: int) -> Tensor:
        x, here = self.inputs, self._tokens(i)
        d = [self.lp[i][u] - x["logp_old"][i][u] for u in here]
        s = sequence_ratio(self.config, d, [x["advantages"][i][u] for u in here])
        lr = x["logp_rollout"][i][t] if self._reads_rollout() else math.nan
        a, lo = x["advantages"][i][t], x["logp_old"][i][t]
        return ALGOS[self.config["algo"]](self.config, a, self.lp[i][t], lo, lr, s)

    def _opsm(self) -> list[int]:
        opsm, keep = self.config.get("opsm"), [1] * len(self.mask)
        for i in range(len(self.mask)) if opsm else ():
            here = self._tokens(i)
            other = {"old": "logp_old"}.get(opsm.get("against", "rollout"), "logp_rollout")
            gap = [self.inputs[other][i][t] - float(self.lp[i][t].detach()) for t in here]
            negative = sum(self.inputs["advantages"][i][t] for t in here) < 0
            if here and negative and mean(gap) > opsm["delta"]:
                keep[i] = 0
        return keep

    def _term(self, i: int, t: int) -> Tensor:
        w = self.weight[i][t]
        omega = self.correction["weight"][i][t] if self.correction else 1.0
        term = w * omega * self.opsm[i] * self.policy[i, t]
        self.pg += float(term.detach())
        if (c := self.config.get("kl")) is not None:
            x = self.inputs
            part = w * c["coef"] * kl(c, self.lp[i][t], x["logp_ref"][i][t], x["logp_old"][i][t])
            term, self.kl = term + part, self.kl + float(part.detach())
        if (coef := self.config.get("entropy_coef")) is not None:
            part = -w * coef * self.inputs["entropy"][i][t]
            term, self.entropy = term + part, self.entropy + part
        return term

    def expected(self) -> dict[str, Any]:
        loss = sum(self.terms.values(), number(0))
        if self.terms:
            loss.backward()
        out = {
            "loss": float(loss.detach()),
            "pg_loss": self.pg,
            "kl_loss_scaled": self.kl,
            "entropy_loss_scaled": self.entropy,
            "token_pg_loss": self._ragged(lambda i, t: float(self.policy[i, t].detach())),
            "token_weight": self.weight,
            "grad_logp": self.grad(),
            "metrics": self._metrics(),
        }
        if (coef := self.config.get("entropy_coef")) is not None:
            out["grad_entropy"] = self._ragged(lambda i, t: -coef * self.weight[i][t])
        if self.correction:
            out["rollout_weight"] = self.correction["weight"]
            out["rollout_keep"] = self.correction["keep"]
        if "opsm" in self.config:
            out["opsm_keep"] = self.opsm
        return out

    def grad(self) -> list[list[float]]:
        def of(i: int, t: int) -> float:
            grad = self.lp[i][t].grad
            return 0.0 if grad is None else float(grad)

        return self._ragged(of)

    def _ragged(self, value: Callable[[int, int], float]) -> list[list[float]]:
        return [
            [value(i, t) if (i, t) in self.used else 0.0 for t in range(len(part))]
            for i, part in enumerate(self.mask)
        ]

    def _metrics(self) -> dict[str, Any]:
        x = self.inputs
        d = {(i, t): float(self.lp[i][t].detach()) - x["logp_old"][i][t] for i, t in self.used}
        z = {i: mean([d[i, t] for t in self._tokens(i)]) for i in {i for i, _ in self.used}}
        r = [math.exp(clamp(v)) for v in d.values()]
        s = [math.exp(clamp(v)) for v in z.values()]
        found: dict[str, Any] = {"n_tokens": len(d), "n_nonempty_sequences": len(z)}
        found |= {f"clipfrac_{k}": v for k, v in self._clipped(d, z).items()}
        if d:
            found |= {
                "approx_kl_k1": -mean([clamp(v) for v in d.values()]),
                "approx_kl_k3": mean([math.expm1(clamp(v)) - clamp(v) for v in d.values()]),
                "ratio_mean": mean(r),
                "ratio_max": max(r),
                "ratio_min": min(r),
                "ratio_ess": math.fsum(r) ** 2 / len(r) / math.fsum(v * v for v in r),
                "seq_geo_ratio_mean": mean(s),
                "seq_geo_ratio_max": max(s),
                "seq_geo_ratio_min": min(s),
            }
        if self.bad:
            found["nonfinite_tokens"] = len(self.bad)
        return found

    def _clipped(self, d: Mapping[Token, float], z: Mapping[int, float]) -> dict[str, float]:
        c, algo = self.config, self.config["algo"]
        counts = {"high": 0, "low": 0, "dual": 0}
        if algo in ("reinforce", "sapo") or (algo == "cispo" and not c.get("ppo_mask")):
            return counts
        low, high = (-c["eps_low"], c["eps_high"]) if algo == "gmpo" else map(math.log, ends(c))
        for (i, t), own in d.items():
            a = self.inputs["advantages"][i][t]
            x = z[i] if algo.startswith("gspo") else own
            counts["high"] += a > 0 and x > high
            counts["low"] += a < 0 and x < low
            dual = algo in ("ppo_clip", "aspo") and c.get("dual_clip")
            counts["dual"] += bool(dual) and a < 0 and own > math.log(c["dual_clip"])
        return {k: n / max(1, len(d)) for k, n in counts.items()}


def loss(config: Config, inputs: Config) -> dict[str, Any]:
    return Loss(config, inputs).expected()


def elementwise(config: Config, inputs: Config) -> dict[str, Any]:
    each = {name: [[v] for v in values] for name, values in inputs.items()}
    each["mask"] = [[1]] * len(inputs["logp"])
    agg = {"mode": "constant", "constant": 1 / len(inputs["logp"])}
    found = Loss({**config, "agg": agg}, each).expected()
    return {
        "token_loss": [v for (v,) in found["token_pg_loss"]],
        "grad_logp": [v for (v,) in found["grad_logp"]],
    }


def kl_values(config: Config, inputs: Config) -> dict[str, Any]:
    lp = [number(x).requires_grad_() for x in inputs["logp"]]
    values = [
        kl(config, *row) for row in zip(lp, inputs["logp_ref"], inputs["logp_old"], strict=True)
    ]
    sum(values, number(0)).backward()
    return {
        "value": [float(v.detach()) for v in values],
        "grad_logp": [float(x.grad) if x.grad is not None else 0.0 for x in lp],
    }


def kl_cov(config: Config, inputs: Config) -> dict[str, Any]:
    tokens = [(i, t) for i, part in enumerate(inputs["mask"]) for t, m in enumerate(part) if m]
    a = {(i, t): inputs["advantages"][i][t] for i, t in tokens}
    p = {(i, t): inputs["logp"][i][t] for i, t in tokens}
    mean_a, mean_p = mean(list(a.values())), mean(list(p.values()))
    cov = {k: (a[k] - mean_a) * (p[k] - mean_p) for k in tokens}
    wanted = max(1, int(config["ratio"] * len(tokens)))
    chosen = sorted(sorted(tokens, key=lambda k: -cov[k])[:wanted])
    lp = {k: number(p[k]).requires_grad_() for k in tokens}
    total = number(0)
    for i, t in tokens:
        d = lp[i, t] - inputs["logp_old"][i][t]
        total = total - a[i, t] * ratio_of(d)
        if (i, t) in chosen:
            total = total + config["coef"] * d.abs()
    (total / len(tokens)).backward()
    return {
        "loss": float(total.detach()) / len(tokens),
        "grad_logp": [
            [float(lp[i, t].grad) if m else 0.0 for t, m in enumerate(part)]
            for i, part in enumerate(inputs["mask"])
        ],
        "selected": [list(k) for k in chosen],
        "cov": list(cov.values()),
    }


def sharded(config: Config, inputs: Config) -> dict[str, Any]:
    batch, cp = inputs["batch"], config["cp"]
    found = Loss(config["loss"], batch)
    whole = found.expected()
    owner = []
    for prompt, part in zip(batch["prompt_len"], batch["mask"], strict=True):
        chunk = -(-(prompt + len(part)) // (2 * cp))
        chunks = [(prompt + t - 1) // chunk for t in range(len(part))]
        owner.append([k if k < cp else 2 * cp - 1 - k for k in chunks])
    shards = []
    for dp_rank, rows in enumerate(inputs["assignment"]):
        for microbatch, members in enumerate(rows):
            for rank in range(cp):
                held = [(i, t) for i in members for t, o in enumerate(owner[i]) if o == rank]
                d = {(i, t): batch["logp"][i][t] - batch["logp_old"][i][t] for i, t in held}
                shards.append(
                    {
                        "dp_rank": dp_rank,
                        "microbatch": microbatch,
                        "cp_rank": rank,
                        "tokens": [[i, [t for j, t in held if j == i]] for i in members],
                        "local_loss_numerator_over_global_denominator": math.fsum(
                            float(found.terms[k].detach()) for k in held if k in found.terms
                        ),
                        "local_token_count": sum(k in found.trained for k in held),
                        "local_seq_logratio_sum": {
                            str(i): math.fsum(
                                d[k] for k in held if k[0] == i and k in found.trained
                            )
                            for i in members
                        },
                    }
                )
    counts = [sum(part) for part in batch["mask"]]
    return {
        "global_token_count": sum(counts),
        "global_seq_count_all": len(counts),
        "global_seq_count_nonempty": sum(n > 0 for n in counts),
        "cp_owner": owner,
        "shards": shards,
        "loss": whole["loss"],
        "grad_logp": whole["grad_logp"],
        "grad_norm": math.sqrt(math.fsum(g * g for part in whole["grad_logp"] for g in part)),
    }


LOSSES: dict[str, Callable[[Config, Config], dict[str, Any]]] = {
    "loss": loss,
    "elementwise": elementwise,
    "kl": kl_values,
    "kl_cov": kl_cov,
    "sharded": sharded,
}
