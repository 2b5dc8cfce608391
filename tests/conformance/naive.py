"""The format's kinds once more, written straight from their definitions: loops over tokens, Python
floats, gradients by autograd of one scalar. Shares no code with megarl.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Config = Mapping[str, Any]
Ragged = list[list[Any]]


def clamp(x: float, limit: float = 20.0) -> float:
    return max(-limit, min(limit, x))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float], ddof: int) -> float:
    return statistics.stdev(values) if ddof == 1 else statistics.pstdev(values)


def flat(values: Sequence[float]) -> bool:
    return max(values) == min(values)


# ---- advantages


def seq_advantage(config: Config, inputs: Config) -> dict[str, Any]:
    rewards, groups = inputs["rewards"], inputs["groups"]
    lengths = inputs["lengths"]
    truncated = inputs.get("truncated", [False] * len(rewards))
    variant = config.get("truncated_variant")
    valid = [math.isfinite(r) for r in rewards]
    counted = [
        i for i, ok in enumerate(valid) if ok and not (variant == "exclude" and truncated[i])
    ]
    ddof, eps, name = config.get("ddof", 1), config.get("eps", 1e-6), config["estimator"]
    everyone = [rewards[i] for i in counted]
    members = {g: [i for i in counted if groups[i] == g] for g in groups}
    informative = sum(
        len(m) for m in members.values() if len(m) > 1 and not flat([rewards[i] for i in m])
    )
    out = [0.0] * len(rewards)
    for group in members.values():
        r = [rewards[i] for i in group]
        for i in group:
            others = [rewards[j] for j in group if j != i]
            if not others:
                if config.get("singleton") == "raw":
                    scale = {"none": None, "batch": std(everyone, ddof)}.get(
                        config.get("scale", "group"), 1.0
                    )
                    plain = name != "grpo" or scale is None
                    out[i] = rewards[i] if plain else rewards[i] / (scale + eps)
                continue
            if flat(r):
                continue
            centred = rewards[i] - mean(r)
            scales = {"group": std(r, ddof) + eps, "batch": std(everyone, ddof) + eps, "none": 1.0}
            loo = rewards[i] - mean(others)
            spread = len(others) > ddof and not flat(others)
            weights = [lengths[j] for j in group]
            out[i] = {
                "grpo": centred / scales[config.get("scale", "group")],
                "dr_grpo": centred,
                "rloo": loo,
                "grpo_loo": loo / (std(others, ddof) + eps) if spread else loo,
                "opo": rewards[i]
                - sum(x * w for x, w in zip(r, weights, strict=True)) / sum(weights),
                "gpg": centred * len(counted) / informative / config.get("f_norm", 1.0),
            }[name]
    if variant:
        out = [0.0 if t else a for a, t in zip(out, truncated, strict=True)]
    return {"advantages": out, "valid": valid}


def process_advantage(config: Config, inputs: Config) -> dict[str, Any]:
    out = []
    for i, length in enumerate(inputs["lengths"]):
        peers = [j for j, g in enumerate(inputs["groups"]) if g == inputs["groups"][i]]
        pool = [r for j in peers for r in inputs["step_rewards"][j]]
        steps = list(zip(inputs["step_rewards"][i], inputs["step_end"][i], strict=True))
        if len(pool) < 2 or flat(pool):
            out.append([0.0] * length)
            continue
        scale = std(pool, config["ddof"]) + config["eps"]
        out.append(
            [sum((r - mean(pool)) / scale for r, end in steps if end >= t) for t in range(length)]
        )
    return {"advantages": out}


def gdpo(config: Config, inputs: Config) -> dict[str, Any]:
    total = [0.0] * len(inputs["groups"])
    for component, weight in zip(inputs["reward_components"], inputs["weights"], strict=True):
        found = seq_advantage(
            {"estimator": "grpo", "eps": config["eps"]},
            {"rewards": component, "groups": inputs["groups"], "lengths": component},
        )["advantages"]
        total = [t + weight * a for t, a in zip(total, found, strict=True)]
    scale = std(total, 1) + config["eps"]
    return {"advantages": [(t - mean(total)) / scale for t in total]}


def whiten(values: Ragged, mask: Ragged) -> dict[str, Any]:
    used = [
        v for vs, ms in zip(values, mask, strict=True) for v, m in zip(vs, ms, strict=True) if m
    ]
    mu, var = mean(used), statistics.variance(used)
    out = [
        [(v - mu) / math.sqrt(var + 1e-8) if m else 0.0 for v, m in zip(vs, ms, strict=True)]
        for vs, ms in zip(values, mask, strict=True)
    ]
    return {"advantages": out, "mean": mu, "var": var}


def reinforce_pp(config: Config, inputs: Config) -> dict[str, Any]:
    returns = []
    for reward, mask, kl in zip(inputs["rewards"], inputs["mask"], inputs["kl"], strict=True):
        trained = [t for t, m in enumerate(mask) if m]
        out, later = [0.0] * len(mask), 0.0
        for t in reversed(trained):
            here = -config["kl_coef"] * kl[t] + (reward if t == trained[-1] else 0.0)
            later = out[t] = here + config["gamma"] * later
        returns.append(out)
    return {"returns": returns, **whiten(returns, inputs["mask"])}


def reinforce_pp_baseline(config: Config, inputs: Config) -> dict[str, Any]:
    rewards, groups = inputs["rewards"], inputs["groups"]
    centred = [
        r - mean([x for x, h in zip(rewards, groups, strict=True) if h == g])
        for r, g in zip(rewards, groups, strict=True)
    ]
    values = [[c] * len(m) for c, m in zip(centred, inputs["mask"], strict=True)]
    return whiten(values, inputs["mask"])


def gae(config: Config, inputs: Config) -> dict[str, Any]:
    advantages, returns = [], []
    for rewards, values, mask, after in zip(
        *(inputs[k] for k in ("rewards", "values", "mask", "bootstrap")), strict=True
    ):
        trained = [t for t, m in enumerate(mask) if m]
        earned = dict.fromkeys(trained, 0.0)
        for t, reward in enumerate(rewards):
            before = [u for u in trained if u <= t]
            if before and (mask[t] or config.get("masked_reward") != "drop"):
                earned[before[-1]] += reward
        a, r = [0.0] * len(mask), [0.0] * len(mask)
        value, advantage = after, 0.0
        for t in reversed(trained):
            delta = earned[t] + config["gamma"] * value - values[t]
            advantage = a[t] = delta + config["gamma"] * config["lam"] * advantage
            value, r[t] = values[t], advantage + values[t]
        advantages.append(a)
        returns.append(r)
    bounds = [0]
    for mask in inputs["mask"]:
        bounds.append(bounds[-1] + len(mask))
    packed = {
        "cu_seqlens": bounds,
        "advantages": [x for part in advantages for x in part],
        "returns": [x for part in returns for x in part],
    }
    return {"advantages": advantages, "returns": returns, "packed": packed}


# ---- correction and mismatch


def sequence_sums(inputs: Config) -> list[tuple[list[float], list[int]]]:
    """Of every sequence (log rho of its usable tokens, which these are)."""
    out = []
    for lo, lr, mask in zip(
        inputs["logp_old"], inputs["logp_rollout"], inputs["mask"], strict=True
    ):
        used = [
            t for t, m in enumerate(mask) if m and math.isfinite(lo[t]) and math.isfinite(lr[t])
        ]
        out.append(([lo[t] - lr[t] for t in used], used))
    return out


def rollout_correction(config: Config, inputs: Config) -> dict[str, Any]:
    weights, keeps, level = [], [], config.get("level")
    sums = sequence_sums(inputs)
    low, high = config.get("low") or 0.0, config.get("high") or math.inf
    for (g, used), mask in zip(sums, inputs["mask"], strict=True):
        w, k = [0.0] * len(mask), [0] * len(mask)
        geo = math.exp(clamp(mean(g))) if g else 1.0
        good = True
        if config.get("geo_filter"):
            good = config["geo_filter"][0] <= geo <= config["geo_filter"][1]
        if config.get("veto"):
            good = good and all(math.exp(clamp(x)) >= config["veto"] for x in g)
        for x, t in zip(g, used, strict=True):
            raw = {
                None: 1.0,
                "token": math.exp(clamp(x)),
                "sequence": math.exp(clamp(math.fsum(g))),
                "geometric": geo,
            }[level]
            inside = level is None or config.get("mode") != "mask" or low <= raw <= high
            if good and inside:
                w[t], k[t] = (min(max(raw, low), high) if level else raw), 1
        weights.append(w)
        keeps.append(k)
    if config.get("batch_normalize"):
        per_sequence = [max(w) for w, (g, _) in zip(weights, sums, strict=True) if g]
        per_token = [w[t] for w, (_, used) in zip(weights, sums, strict=True) for t in used]
        by = mean(per_token if level in (None, "token") else per_sequence)
        weights = [[x / by for x in w] for w in weights]
    return {
        "weight": weights,
        "keep": keeps,
        "seq_log_ratio_sum": [math.fsum(g) for g, _ in sums],
        "seq_geo_ratio": [math.exp(clamp(mean(g))) if g else None for g, _ in sums],
    }


def mismatch_metrics(config: Config, inputs: Config) -> dict[str, Any]:
    g = [x for part, _ in sequence_sums(inputs) for x in part]
    rho = [math.exp(clamp(x)) for x in g]
    train, rollout, chi = [], [], []
    for i, (part, used) in enumerate(sequence_sums(inputs)):
        if used:
            train.append(-mean([inputs["logp_old"][i][t] for t in used]))
            rollout.append(-mean([inputs["logp_rollout"][i][t] for t in used]))
            chi.append(math.exp(2 * clamp(math.fsum(part))))
    gap = [a - b for a, b in zip(train, rollout, strict=True)]
    squares = mean([x * x for x in rho])
    return {
        "kl_rollout_train_k1": -mean(g),
        "kl_rollout_train_k3": mean([math.expm1(clamp(x)) - clamp(x) for x in g]),
        "abs_logprob_diff": mean([abs(x) for x in g]),
        "max_abs_logprob_diff": max(abs(x) for x in g),
        "mult_prob_error": mean([math.exp(abs(x)) for x in g]),
        "rho_mean": mean(rho),
        "ess": mean(rho) ** 2 / squares,
        "chi2_token": squares - 1,
        "chi2_seq": mean(chi) - 1,
        "train_ppl": mean([math.exp(x) for x in train]),
        "rollout_ppl": mean([math.exp(x) for x in rollout]),
        "log_ppl_diff": mean(gap),
        "log_ppl_abs_diff": mean([abs(x) for x in gap]),
        "ppl_ratio": mean([math.exp(x) for x in gap]),
        "extreme_frac_gt2": mean([float(abs(x) > math.log(2)) for x in g]),
    }


# ---- the rest


def value_loss(config: Config, inputs: Config) -> dict[str, Any]:
    n = sum(map(sum, inputs["mask"]))
    eps = config.get("value_clip")
    loss, clipped, grads = 0.0, 0, []
    for v, old, target, mask in zip(
        *(inputs[k] for k in ("values", "values_old", "returns", "mask")), strict=True
    ):
        grad = [0.0] * len(mask)
        for t, m in enumerate(mask):
            if m:
                a = v[t] - target[t]
                b = a if eps is None else old[t] + clamp(v[t] - old[t], eps) - target[t]
                loss += max(a * a, b * b) / 2 / n
                clipped += b * b > a * a
                grad[t] = a / n if a * a >= b * b else 0.0
        grads.append(grad)
    return {"loss": loss, "grad_values": grads, "clipfrac": clipped / n}


def logits(config: Config, inputs: Config) -> dict[str, Any]:
    z = torch.tensor(inputs["logits"], dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(z / config["temperature"], -1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp[range(len(z)), inputs["targets"]]
    grads = [torch.tensor(inputs[k], dtype=torch.float64) for k in ("grad_logp", "grad_entropy")]
    (chosen @ grads[0] + entropy @ grads[1]).backward()
    assert z.grad is not None
    return {
        "logp": chosen.tolist(),
        "entropy": entropy.tolist(),
        "grad_logits": z.grad.tolist(),
    }


def adaptive_entropy(config: Config, inputs: Config) -> dict[str, Any]:
    c, trace = config["c0"], []
    for e in inputs["entropy"]:
        low = e <= config["target"]
        trace.append({"entropy": e, "c": c, "alpha_applied": c if low else 0.0})
        c = c + config["delta"] if low else c - config["delta"]
        c = min(config["c_max"], max(config["c_min"], c))
    return {"trace": trace}


def overlong(config: Config, inputs: Config) -> dict[str, Any]:
    start = config["l_max"] - config["l_cache"]

    def penalty(length: int) -> float:
        if length <= start:
            return 0.0
        return (start - length) / config["l_cache"] if length <= config["l_max"] else -1.0

    return {"penalty": [penalty(length) for length in inputs["lengths"]]}


def dynamic_sampling(config: Config, inputs: Config) -> dict[str, Any]:
    kept = {}
    for g in inputs["groups"]:
        of = [a for a, h in zip(inputs["accuracy"], inputs["groups"], strict=True) if g == h]
        kept[str(g)] = 0 < sum(of) < len(of)
    return {"keep_group": kept}


def whiten_shards(config: Config, inputs: Config) -> dict[str, Any]:
    every = [x for part in inputs["shards"] for x in part]
    var = statistics.variance(every) if len(every) > 1 else 0.0

    def of(part: list[float]) -> list[float]:
        mu = mean(part) if part else 0.0
        return [len(part), mu, sum((x - mu) ** 2 for x in part)]

    return {
        "parts": [of(part) for part in inputs["shards"]],
        "n": len(every),
        "mean": mean(every),
        "var_ddof1": var,
        "merged_mean": mean(every),
        "merged_var_ddof1": var,
    }


def long_accum(config: Config, inputs: Config) -> dict[str, Any]:
    x, d = config["seed"], []
    for _ in range(config["n"]):
        x = (1664525 * x + 1013904223) % 2**32
        d.append(((x >> 12) / 2**20 - 0.5) / 64)
    return {
        "first_four_d": d[:4],
        "sum_exact": math.fsum(d),
        "mean": math.fsum(d) / len(d),
        "s_ratio": math.exp(math.fsum(d) / len(d)),
    }


SIMPLE: dict[str, Callable[[Config, Config], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        *(seq_advantage, process_advantage, gdpo, reinforce_pp, reinforce_pp_baseline, gae),
        *(rollout_correction, mismatch_metrics, value_loss, logits, adaptive_entropy, overlong),
        *(dynamic_sampling, whiten_shards, long_accum),
    )
}
