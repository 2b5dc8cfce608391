"""Kinds about rewards and advantages."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from megarl.algos.advantages import (
    Batch,
    centred_rewards,
    moments_of,
    reinforce_pp_returns,
    whitened,
)
from megarl.algos.component_advantages import gdpo_advantages, process_advantages
from megarl.algos.control import EntropyController
from megarl.algos.group_advantages import Outcomes, group_advantages
from megarl.algos.moments import Moments, merge_moments
from megarl.algos.shaping import informative_groups, overlong_penalty
from megarl.algos.token_advantages import gae
from megarl.config.algo import (
    AdaptiveEntropy,
    GaeAdvantage,
    GdpoAdvantage,
    OpoAdvantage,
    OverlongSection,
    ProcessAdvantage,
    ReinforcePpAdvantage,
)
from megarl.conformance import sections
from megarl.conformance.cases import Given, Unsupported
from megarl.conformance.rows import Packed, Sequences, rounded, vector
from megarl.conformance.sections import build, check_keys

Computed = Mapping[str, Any]
FULL_MARKS = 1  # accuracy from which a sample counts as correct


def seq_advantage(given: Given, dtype: torch.dtype) -> Computed:
    x = given.inputs
    section: Any = sections.advantage(given.config)
    if section.truncated_variant is not None:
        x.require("truncated")
    if isinstance(section, OpoAdvantage):
        x.require("lengths")
    outcomes = Outcomes.of(
        rounded(x["rewards"], dtype), x["groups"], x.get("lengths"), x.get("truncated")
    )
    values = vector(group_advantages(section, outcomes).tolist(), dtype)
    return {"advantages": values.tolist(), "valid": outcomes.valid.tolist()}


def process_advantage(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ("ddof", "eps"))
    x = given.inputs
    rewards = [rounded(part, dtype) for part in x["step_rewards"]]
    section = build(ProcessAdvantage, **given.config)
    values = process_advantages(section, rewards, x["step_end"], x["lengths"], x["groups"])
    return {"advantages": [vector(part.tolist(), dtype).tolist() for part in values]}


def gdpo(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ("eps", "ddof"))
    if given.config.get("ddof", 1) != 1:
        raise Unsupported("config.ddof is 1 in gdpo")
    x = given.inputs
    components = [rounded(part, dtype) for part in x["reward_components"]]
    weights = x.get("weights")
    section = build(
        GdpoAdvantage,
        weights=None if weights is None else tuple(weights),
        **{k: v for k, v in given.config.items() if k == "eps"},
    )
    rewards = np.asarray(components).sum(0)
    values = gdpo_advantages(section, components, Outcomes.of(rewards, x["groups"]))
    return {"advantages": vector(values.tolist(), dtype).tolist()}


def reinforce_pp(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ("gamma", "kl_coef"))
    coef = float(given.config.get("kl_coef") or 0.0)
    own = {k: v for k, v in given.config.items() if k == "gamma"}
    section = build(ReinforcePpAdvantage, **own)
    sequences = Sequences(given.inputs, dtype)
    packed = sequences.whole()
    penalty = coef * packed.put(sequences.ragged("kl", optional=not coef), dtype).double()
    batch = _batch(sequences, packed, penalty)
    (returns,) = reinforce_pp_returns(section, batch)
    found = _whitened(returns, batch, packed, dtype)
    return {"returns": packed.take(returns.to(dtype)), **found}


def reinforce_pp_baseline(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ())
    given.inputs.require("groups")
    sequences = Sequences(given.inputs, dtype)
    packed = sequences.whole()
    batch = _batch(sequences, packed, torch.zeros(len(packed.row.mask), dtype=torch.float64))
    (values,) = centred_rewards(batch)
    return _whitened(values, batch, packed, dtype)


def _batch(sequences: Sequences, packed: Packed, penalty: torch.Tensor) -> Batch:
    rewards = rounded(sequences.inputs["rewards"], sequences.dtype)
    outcomes = Outcomes.of(rewards, sequences.groups, list(sequences.trained.values()))
    return Batch(
        sequences.samples, outcomes, [packed.row], lambda row: penalty, lambda value: [value]
    )


def _whitened(
    values: torch.Tensor, batch: Batch, packed: Packed, dtype: torch.dtype
) -> dict[str, Any]:
    moments = moments_of([values], batch)
    (advantages,) = whitened([values], batch)
    return {
        "advantages": packed.take(advantages.to(dtype)),
        "mean": moments.mean,
        "var": moments.variance,
    }


def whiten_shards(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ())
    shards = [vector(part, dtype) for part in given.inputs["shards"]]
    parts = [Moments.of(shard) for shard in shards]
    whole, merged = Moments.of(torch.cat([*shards, vector([], dtype)])), merge_moments(parts)
    return {
        "parts": [[p.n, p.mean, p.m2] for p in parts],
        "n": merged.n,
        "mean": whole.mean,
        "var_ddof1": whole.variance,
        "merged_mean": merged.mean,
        "merged_var_ddof1": merged.variance,
    }


def generalised(given: Given, dtype: torch.dtype) -> Computed:
    """Kind gae."""
    check_keys(given.config, ("gamma", "lam", "masked_reward"))
    section = build(GaeAdvantage, **given.config)
    sequences = Sequences(given.inputs, dtype)
    packed = sequences.whole()
    bootstrap = given.inputs.get("bootstrap") or [0.0] * len(sequences.all)
    after = rounded([0.0 if b is None else b for b in bootstrap], dtype)
    found = gae(
        packed.put(sequences.ragged("rewards"), dtype),
        packed.put(sequences.ragged("values"), dtype),
        packed.row.mask,
        packed.row.cu_seqlens,
        packed.row.of_segments(after),
        gamma=section.gamma,
        lam=section.lam,
        masked_reward=section.masked_reward,
    )
    ragged = dict(
        zip(("advantages", "returns"), (packed.take(v.to(dtype)) for v in found), strict=True)
    )
    bounds = np.cumsum([0, *(len(part) for part in sequences.mask)]).tolist()
    flat = {name: [v for part in parts for v in part] for name, parts in ragged.items()}
    return {**ragged, "packed": {"cu_seqlens": bounds, **flat}}


def overlong(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ("l_max", "l_cache"))
    section = build(OverlongSection, **given.config)
    found = overlong_penalty(given.inputs["lengths"], section.l_max, section.l_cache)
    return {"penalty": found.tolist()}


def dynamic_sampling(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ())
    correct = [accuracy >= FULL_MARKS for accuracy in given.inputs["accuracy"]]
    kept = informative_groups(correct, given.inputs["groups"])
    return {"keep_group": {str(group): keep for group, keep in kept.items()}}


def adaptive_entropy(given: Given, dtype: torch.dtype) -> Computed:
    """The measured entropy is a float64 number of the host, whatever the tensors are."""
    check_keys(given.config, ("c0", "target", "delta", "c_min", "c_max"))
    section = build(AdaptiveEntropy, **given.config)
    controller = EntropyController(section, section.c0)
    trace = []
    for entropy in given.inputs["entropy"]:
        applied = controller.coefficient(entropy)
        trace.append({"entropy": entropy, "c": controller.state(), "alpha_applied": applied})
        controller.update(entropy, 0)
    return {"trace": trace}
