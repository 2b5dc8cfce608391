"""Rows and terms for the tests of policy_loss: ragged, with holes, and numbers at the edges."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.ops.policy_loss import KL_TYPES, KL_WEIGHTS, OPSM, PolicyRow, PolicyTerms
from tests.ops.plain_policy import REALS

LENGTHS = (0, 1, 5, 0, 16, 33, 40, 3, 0)
ALL_MASKED = 7  # the sequence of 3 tokens
FAR, SPOILT = "far", "spoilt"
KINDS = ("ordinary", FAR, SPOILT)

# Every objective's bounds are met by some tokens.
PARAMETERS = dict(
    **dict(low=0.8, high=1.28, log_low=float(np.log(0.95)), log_high=float(np.log(1.05))),
    **dict(wide_low=0.6, wide_high=1.4, cap=1.5, floor=0.7, tau_pos=3.0, tau_neg=3.5),
    **dict(penalty=0.7, kl_coef=0.1, kl_input_clamp=1.5, kl_output_clamp=0.5),
    **dict(entropy_coef=0.01, opsm_delta=0.0),
)
NARROW = dict(low=0.95, high=1.05)  # exp of their logarithms above, by which gspo decides
DIVERGENCES = [("", "none"), *itertools.product(KL_TYPES[1:], KL_WEIGHTS)]


def row(
    kind: str = "ordinary",
    dtype: torch.dtype = torch.float64,
    lengths: tuple[int, ...] = LENGTHS,
    seed: int = 0,
    spread: float = 0.4,
) -> PolicyRow:
    """Every field given. ``far``: log-ratios beyond the clamps; ``spoilt``: trained tokens that are
    not finite, in some field each.
    """
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    num_tokens = sum(lengths)
    old = -3 * rng.random(num_tokens)
    values = {
        "logprobs": old + rng.normal(0, spread, num_tokens),
        "old_logprobs": old,
        "advantages": rng.normal(0, 1, num_tokens),
        "weight": rng.random(num_tokens) / max(num_tokens, 1),
        "rollout_logprobs": old + rng.normal(0, spread, num_tokens),
        "ref_logprobs": old + rng.normal(0, 2 * spread, num_tokens),
        "correction": 2 * rng.random(num_tokens),
        "entropy": 3 * rng.random(num_tokens),
    }
    values["advantages"][rng.random(num_tokens) < 0.1] = 0.0
    values["logprobs"][rng.random(num_tokens) < 0.05] = -0.5
    values["old_logprobs"][values["logprobs"] == -0.5] = -0.5  # d = 0
    mask = rng.random(num_tokens) < 0.8
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    if kind == FAR:
        far = rng.random(num_tokens) < 0.1
        values["logprobs"][far] += rng.choice([-25.0, 25.0], far.sum())
    if lengths == LENGTHS:
        mask[bounds[ALL_MASKED] : bounds[ALL_MASKED + 1]] = False
        if kind == FAR:  # a whole sequence beyond the clamp, either way
            values["logprobs"][bounds[4] : bounds[5]] -= 30.0
            values["logprobs"][1:6] += 40.0
    if kind == SPOILT:
        spoil(values, mask, rng)
    return PolicyRow(
        **{name: torch.tensor(v, dtype=dtype) for name, v in values.items()},
        mask=torch.tensor(mask),
        selected=torch.tensor(rng.random(num_tokens) < 0.3),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
    )


def spoil(values: dict[str, np.ndarray], mask: np.ndarray, rng: np.random.Generator) -> None:
    """One token a field, so that which are dropped depends on what is read."""
    for at, name in enumerate(values):
        token = 23 + 3 * at if name != "logprobs" else 2
        if token < len(mask):
            mask[token] = True
            values[name][token] = rng.choice([np.nan, np.inf, -np.inf])


def terms(objective: str, **changes: Any) -> PolicyTerms:
    """With every term. ``changes``: of ``PolicyTerms``, or of its parameters."""
    usual = PARAMETERS | (NARROW if objective in ("gspo", "gspo_token") else {})
    parameters = {k: changes.pop(k, v) for k, v in usual.items()}
    given = dict(kl_type="k3", kl_weight="old", opsm="rollout") | changes
    return PolicyTerms(objective, parameters, **given)


def variants(objective: str) -> list[PolicyTerms]:
    """Kernels may go over a sequence once or twice, by what is known of it when its tokens come."""
    return [terms(objective), terms(objective, kl_type=""), terms(objective, kl_type="", opsm="")]


def without(whole: PolicyRow, *names: str) -> PolicyRow:
    return replace(whole, **{name: None for name in names})


def with_garbage(x: Tensor, at: Tensor, seed: int) -> Tensor:
    """``x`` with numbers at ``at`` that no arithmetic survives."""
    kinds = torch.tensor([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-42], dtype=x.dtype)
    pick = torch.randint(0, 6, x.shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(at, kinds[pick], x)


def as_numpy(whole: PolicyRow) -> dict[str, np.ndarray | None]:
    """Real rows in float64."""

    def converted(name: str, x: Tensor | None) -> np.ndarray | None:
        if x is None:
            return None
        return x.detach().double().numpy() if name in REALS else x.numpy()

    return {name: converted(name, x) for name, x in vars(whole).items()}


def combinations(objective: str) -> Iterator[tuple[str, PolicyTerms, tuple[str, ...]]]:
    """(kind of row, terms, fields that are not given): every divergence with every kind of
    off-policy masking and of row; what else may be left out is in turns.
    """
    everything = itertools.product(DIVERGENCES, OPSM, KINDS)
    for turn, ((kl_type, kl_weight), opsm, kind) in enumerate(everything):
        on = [bool((turn * 7 >> bit) & 1) for bit in range(4)]
        given = terms(
            objective,
            kl_type=kl_type,
            kl_weight=kl_weight,
            opsm=opsm,
            all_metrics=on[0],
            entropy_coef=PARAMETERS["entropy_coef"] * on[1],
        )
        absent = () if on[2] else ("correction",)
        if not on[3] and objective != "kl_cov":
            absent += ("selected",)
        yield kind, given, absent
