"""An objective's row by the compiled op (``ops/policy_loss.py``): settings -> the op's terms, the
op's totals -> the names of metrics. What is computed is said in ``objective.py``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from megarl.algos.diagnostics import RatioSums
from megarl.algos.ratio import SequenceSums
from megarl.algos.segments import Segments
from megarl.config.algo import KlSection, OpsmSection
from megarl.ops.policy_loss import SUMS, TOTALS, PolicyRow, PolicyTerms, policy_loss, policy_sums
from megarl.types import Coefficients, LossInputs

OP = "policy_loss"
_INFINITE = float("inf")


@dataclass(frozen=True)
class Kernel:
    """``parameters(policy section)`` of ``ops.policy_loss.PARAMETERS``; ``flags(policy section)``:
    names of the op's flag totals, None for one that is not reported; ``mean``: that of its mean.
    """

    parameters: Callable[[Any], dict[str, float]] = lambda policy: {}
    flags: Callable[[Any], Sequence[str | None]] = lambda policy: ()
    mean: str | None = None


def _region(policy: Any) -> dict[str, float]:
    return {"low": 1 - policy.eps_low, "high": 1 + policy.eps_high}


def _log_region(policy: Any) -> dict[str, float]:
    logs = {"log_low": math.log1p(-policy.eps_low), "log_high": math.log1p(policy.eps_high)}
    return _region(policy) | logs


def _ppo_clip(policy: Any) -> dict[str, float]:
    return _region(policy) | {"cap": _INFINITE if policy.dual_clip is None else policy.dual_clip}


def _cispo(policy: Any) -> dict[str, float]:
    low, high = policy.bounds
    nowhere = {"low": -_INFINITE, "high": _INFINITE}
    return {"floor": low, "cap": high} | (_region(policy) if policy.ppo_mask else nowhere)


def _aspo(policy: Any) -> dict[str, float]:
    wide = {"wide_low": 1 - policy.eps_entropic, "wide_high": 1 + policy.eps_entropic}
    return _region(policy) | wide | {"cap": policy.dual_clip}


_CLIP = ("clipfrac_high", "clipfrac_low")

KERNELS: dict[str, Kernel] = {
    "reinforce": Kernel(),
    "sft": Kernel(),
    "ppo_clip": Kernel(
        _ppo_clip, lambda p: (*_CLIP, None if p.dual_clip is None else "clipfrac_dual")
    ),
    "cispo": Kernel(
        _cispo,
        lambda p: ("weight_capped", "weight_raised", *(_CLIP if p.ppo_mask else ())),
        "surrogate_loss",
    ),
    "sapo": Kernel(
        lambda p: {"tau_pos": p.tau_pos, "tau_neg": p.tau_neg}, lambda p: ("gatefrac_low",), "gate"
    ),
    "aspo": Kernel(_aspo, lambda p: (*_CLIP, "clipfrac_dual", "weight_capped")),
    "minirl": Kernel(
        lambda p: _region(p) | {"cap": p.tis_max},
        lambda p: (*_CLIP, "weight_capped"),
        "surrogate_loss",
    ),
    "kl_cov": Kernel(lambda p: {"penalty": p.coef}, lambda p: ("selected",)),
    "gspo": Kernel(_log_region, lambda p: _CLIP),
    "gspo_token": Kernel(_log_region, lambda p: _CLIP),
    "gmpo": Kernel(lambda p: {"log_low": -p.eps_low, "log_high": p.eps_high}, lambda p: _CLIP),
}


def terms_of(
    policy: Any,
    kl: KlSection | None,
    opsm: OpsmSection | None,
    coefficients: Coefficients,
    all_metrics: bool,
) -> PolicyTerms:
    """The settings as the op takes them."""
    parameters = KERNELS[policy.name].parameters(policy) | {"entropy_coef": coefficients.entropy}
    if kl is not None:
        parameters |= {
            "kl_coef": coefficients.kl,
            "kl_input_clamp": kl.input_clamp or _INFINITE,
            "kl_output_clamp": kl.output_clamp or _INFINITE,
        }
    if opsm is not None:
        parameters["opsm_delta"] = opsm.delta
    return PolicyTerms(
        objective=policy.name,
        parameters=parameters,
        kl_type="" if kl is None else kl.type,
        kl_weight="none" if kl is None else kl.weight,
        opsm="" if opsm is None else opsm.against,
        all_metrics=all_metrics,
    )


class Fused(NamedTuple):
    """``grad_entropy``: None without an entropy term. ``totals``: by name, of this rank."""

    grad_logprobs: torch.Tensor
    grad_entropy: torch.Tensor | None
    totals: dict[str, float]
    sequences: SequenceSums


def fused(inputs: LossInputs, segments: Segments, terms: PolicyTerms, reads_rollout: bool) -> Fused:
    """Collective over the row's context-parallel ranks: one all-reduce, between the two passes."""
    row = PolicyRow(
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        weight=inputs.weight,
        mask=inputs.mask,
        cu_seqlens=segments.cu_seqlens,
        rollout_logprobs=inputs.rollout_logprobs if reads_rollout else None,
        ref_logprobs=inputs.ref_logprobs if terms.kl_type else None,
        correction=inputs.correction,
        entropy=inputs.entropy if terms.reads_entropy else None,
        selected=inputs.selected,
    )
    whole = None
    if segments.is_split:
        whole = policy_sums(row, terms)
        segments.reduce(whole)
    found = policy_loss(row, terms, whole)
    return Fused(
        found.grad_logprobs,
        found.grad_entropy if terms.parameters["entropy_coef"] else None,
        dict(zip(TOTALS, found.totals.tolist(), strict=True)),
        SequenceSums(**{name: found.sums[SUMS.index(name)] for name in _SEQUENCE_SUMS}),
    )


_SEQUENCE_SUMS = tuple(f.name for f in fields(SequenceSums))


def tokens_reported(policy: Any, totals: dict[str, float], all_metrics: bool) -> dict[str, float]:
    """Name -> total over used tokens: the policy's flags, and its mean where it was summed."""
    kernel = KERNELS[policy.name]
    found = {name: totals[f"flag{k}"] for k, name in enumerate(kernel.flags(policy)) if name}
    mean = kernel.mean if all_metrics else None
    return found | ({mean: totals["mean"]} if mean else {})


def ratio_sums(totals: dict[str, float]) -> RatioSums:
    return RatioSums(
        approx_kl_k1=totals["approx_kl_k1"],
        approx_kl_k3=totals["approx_kl_k3"],
        ratio=totals["ratio"],
        ratio_sq=totals["ratio_sq"],
        clamped=totals["ratio_clamped"],
        smallest=totals["ratio_min"],
        largest=totals["ratio_max"],
    )
