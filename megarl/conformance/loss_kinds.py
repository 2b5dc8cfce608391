"""Kinds about losses and their parts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megarl.algos.control import Controllers
from megarl.algos.correction import Correction, corrected
from megarl.algos.evaluation import Evaluation
from megarl.algos.kl import kl_term
from megarl.algos.mismatch import mismatch_metrics, mismatch_sums
from megarl.algos.normalize import token_weights
from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.algos.selection import covariance, means_of_step, select_by_covariance
from megarl.algos.value import value_loss as value_loss_of_row
from megarl.algos.weighting import TokenWeights, weigh
from megarl.config.algo import AlgoSection, GroupTokenMean, TokenMean, ValueSection
from megarl.config.policies import KlCovPolicy
from megarl.conformance import sections
from megarl.conformance.cases import Given, Inputs, Unsupported
from megarl.conformance.rows import Packed, Sequences, vector
from megarl.conformance.sections import build, check_keys
from megarl.monitor.metrics import derived, reduce_metrics
from megarl.ops import logprob_entropy
from megarl.types import Coefficients, LossInputs, Mean, StepMetrics

Computed = Mapping[str, Any]


def alone(value: Any) -> list[Any]:
    """``Share`` of a step that lies on one rank."""
    return [value]


@dataclass(frozen=True)
class Step:
    """One optimizer step of a case: its rows before they are cut."""

    algo: AlgoSection
    sequences: Sequences
    rows: Sequence[Packed]

    @cached_property
    def coefficients(self) -> Coefficients:
        return Controllers.of(self.algo).coefficients(0.0, 0.0)

    @cached_property
    def objective(self) -> Objective:
        return Objective.of(self.algo)

    @cached_property
    def weights(self) -> list[TokenWeights]:
        """One a row, of counts over all rows."""
        for packed in self.rows:
            packed.row.old_logprobs = self.put(packed, "logp_old")
            packed.row.rollout_logprobs = self.put(packed, "logp_rollout", self._reads_rollout)
        batches = [packed.row for packed in self.rows]
        s = self.sequences
        return weigh(self.algo, batches, s.trained, s.group_of, alone)

    def put(self, packed: Packed, name: str, needed: bool = True) -> torch.Tensor:
        return packed.put(self.sequences.ragged(name, optional=not needed), self.sequences.dtype)

    def inputs(self, k: int) -> LossInputs:
        """Row k as the loss sees it, before it is cut."""
        packed, weights, dtype = self.rows[k], self.weights[k], self.sequences.dtype
        kept = weights.correction
        return LossInputs(
            logprobs=self.put(packed, "logp"),
            entropy=self.put(packed, "entropy", self.algo.entropy is not None),
            old_logprobs=self.put(packed, "logp_old"),
            rollout_logprobs=self.put(packed, "logp_rollout", self._reads_rollout),
            advantages=self.put(packed, "advantages"),
            weight=weights.aggregation.to(dtype),
            mask=packed.row.mask,
            ref_logprobs=self.put(packed, "logp_ref") if self.algo.kl is not None else None,
            correction=None if kept is None else kept.weight.to(dtype),
            selected=packed.row.selected,
        )

    @property
    def _reads_rollout(self) -> bool:
        return self.objective.reads_rollout or self.algo.correction is not None


def differentiable(inputs: LossInputs) -> LossInputs:
    leaves = {"logprobs": inputs.logprobs, "entropy": inputs.entropy}
    return replace(inputs, **{k: v.detach().clone().requires_grad_() for k, v in leaves.items()})


def gradient(values: torch.Tensor) -> torch.Tensor:
    assert values.grad is not None
    return values.grad


def loss(given: Given, dtype: torch.dtype) -> Computed:
    algo = sections.algo(given.config)
    sequences = Sequences(given.inputs, dtype)
    if isinstance(algo.aggregation, GroupTokenMean):
        given.inputs.require("groups")
    packed = sequences.whole()
    step = Step(algo, sequences, [packed])
    x = differentiable(step.inputs(0))
    segments = Segments(packed.row.cu_seqlens)
    found = step.objective(x, segments, step.coefficients)
    found.loss.backward()
    with torch.no_grad():
        parts = step.objective.evaluate(x, segments, step.coefficients)
    computed = {
        "loss": float(found.loss.detach()),
        **terms(found.metrics),
        "token_pg_loss": packed.take(parts.token.loss),
        "token_weight": packed.take(x.weight),
        "grad_logp": packed.take(gradient(x.logprobs)),
        "metrics": loss_metrics(found.metrics),
    }
    return computed | _if_configured(given.config, packed, x, step.weights[0].correction, parts)


def _if_configured(
    config: Mapping[str, Any],
    packed: Packed,
    x: LossInputs,
    correction: Correction | None,
    parts: Evaluation,
) -> dict[str, Any]:
    computed: dict[str, Any] = {}
    if config.get("entropy_coef") is not None:
        computed["grad_entropy"] = packed.take(gradient(x.entropy))
    if correction is not None:
        assert x.correction is not None
        computed["rollout_weight"] = packed.take(x.correction)
        computed["rollout_keep"] = packed.take(correction.keep.int())
    if config.get("opsm") is not None:
        computed["opsm_keep"] = parts.keep_sequence[: len(packed.where)].int().tolist()
    return computed


# The format's names of metrics -> ours; 0 where there is nothing to take it of.
METRICS = {
    "clipfrac_high": "policy/clipfrac_high",
    "clipfrac_low": "policy/clipfrac_low",
    "clipfrac_dual": "policy/clipfrac_dual",
    "approx_kl_k1": "policy/approx_kl_k1",
    "approx_kl_k3": "policy/approx_kl_k3",
    "ratio_mean": "policy/ratio_mean",
    "ratio_max": "policy/ratio_max",
    "ratio_min": "policy/ratio_min",
    "ratio_ess": "policy/ratio_ess",
    "seq_geo_ratio_mean": "policy/seq_ratio_mean",
    "seq_geo_ratio_max": "policy/seq_ratio_max",
    "seq_geo_ratio_min": "policy/seq_ratio_min",
}


def terms(metrics: StepMetrics) -> dict[str, float]:
    """The loss's parts, each with its coefficient."""
    values = reduce_metrics([metrics])
    return {
        "pg_loss": values["policy/pg_loss"],
        "kl_loss_scaled": values.get("policy/kl_loss", 0.0),
        "entropy_loss_scaled": values["policy/entropy_loss"],
    }


def loss_metrics(metrics: StepMetrics) -> dict[str, float]:
    values = reduce_metrics([metrics])
    values |= derived(values)
    counts = {m.name: int(m.value.count) for m in metrics if isinstance(m.value, Mean)}
    found: dict[str, float] = {
        "n_tokens": counts["policy/approx_kl_k1"],
        "n_nonempty_sequences": counts.get("policy/seq_ratio_mean", 0),
    }
    found |= {theirs: values.get(ours, 0.0) for theirs, ours in METRICS.items()}
    if values["policy/nonfinite_tokens"]:
        found["nonfinite_tokens"] = int(values["policy/nonfinite_tokens"])
    return found


def elementwise(given: Given, dtype: torch.dtype) -> Computed:
    """Every entry is a sequence of one token, of weight 1."""
    check_keys(given.config, ("algo", *sections.POLICY))
    each = {name: [[v] for v in values] for name, values in given.inputs.items()}
    inputs = Inputs({**each, "mask": [[1]] * len(given.inputs["logp"])})
    algo = build(AlgoSection, policy=sections.policy(given.config))
    sequences = Sequences(inputs, dtype)
    packed = sequences.whole()
    step = Step(algo, sequences, [packed])
    x = differentiable(replace(step.inputs(0), weight=packed.row.mask.to(dtype)))
    segments = Segments(packed.row.cu_seqlens)
    step.objective(x, segments).loss.backward()
    with torch.no_grad():
        parts = step.objective.evaluate(x, segments, Coefficients())
    return {
        "token_loss": [v for (v,) in packed.take(parts.token.loss)],
        "grad_logp": [v for (v,) in packed.take(gradient(x.logprobs))],
    }


def kl(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, sections.KL_ESTIMATE)
    section = sections.kl_estimate(given.config)
    x = given.inputs
    lp, ref = vector(x["logp"], dtype), vector(x["logp_ref"], dtype)
    old = vector(x["logp_old"], dtype) if section.weight == "old" else lp
    value, grad = kl_term(lp, ref, old, section)
    return {"value": value.tolist(), "grad_logp": grad.tolist()}


def rollout_correction(given: Given, dtype: torch.dtype) -> Computed:
    section = sections.correction(given.config)
    sequences = Sequences(given.inputs, dtype)
    packed = sequences.whole()
    packed.row.old_logprobs = packed.put(sequences.ragged("logp_old"), dtype)
    packed.row.rollout_logprobs = packed.put(sequences.ragged("logp_rollout"), dtype)
    (found,) = corrected(section, [packed.row], alone)
    count = len(sequences.all)
    ratios = zip(found.geometric_ratio.tolist(), found.count.tolist(), strict=True)
    return {
        "weight": packed.take(found.weight.to(dtype)),
        "keep": packed.take(found.keep.int()),
        "seq_log_ratio_sum": found.log_ratio_sum[:count].tolist(),
        "seq_geo_ratio": [ratio if n else None for ratio, n in ratios][:count],
    }


def mismatch(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ())
    sequences = Sequences(given.inputs, dtype)
    packed = sequences.whole()
    old, rollout = (packed.put(sequences.ragged(n), dtype) for n in ("logp_old", "logp_rollout"))
    segments = Segments(packed.row.cu_seqlens)
    return mismatch_metrics([mismatch_sums(old, rollout, packed.row.mask, segments)])


def value_loss(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ("value_clip",))
    section = build(ValueSection, clip=given.config.get("value_clip"))
    sequences = Sequences(given.inputs, dtype)
    packed = sequences.whole()
    counted = list(sequences.trained.values())
    weights = token_weights(TokenMean(), counted, sequences.groups)
    values, old, returns = (
        packed.put(sequences.ragged(name), dtype) for name in ("values", "values_old", "returns")
    )
    values.requires_grad_()
    weight = packed.row.spread(lambda i: float(weights[i])).to(dtype)
    found = value_loss_of_row(section, values, old, returns, weight, packed.row.mask)
    found.loss.backward()
    return {
        "loss": float(found.loss.detach()),
        "grad_values": packed.take(gradient(values)),
        "clipfrac": reduce_metrics([found.metrics]).get("value/clipfrac", 0.0),
    }


def kl_cov(given: Given, dtype: torch.dtype) -> Computed:
    """Tokens are chosen before the update, when ``logp`` is the old policy's."""
    check_keys(given.config, ("ratio", "coef"))
    policy = build(KlCovPolicy, **given.config)
    algo = build(AlgoSection, policy=policy, aggregation=TokenMean())
    sequences = Sequences(given.inputs, dtype)
    packed = sequences.whole()
    row = packed.row
    row.advantages = packed.put(sequences.ragged("advantages"), dtype)
    row.old_logprobs = packed.put(sequences.ragged("logp"), dtype)
    select_by_covariance(policy, [row], alone)
    assert row.selected is not None
    _, mean_a, mean_lp = means_of_step([row], alone)
    cov = covariance(row.advantages, row.old_logprobs, mean_a, mean_lp)
    chosen = packed.take(row.selected)
    step = Step(algo, sequences, [packed])
    x = differentiable(step.inputs(0))
    found = step.objective(x, Segments(row.cu_seqlens))
    found.loss.backward()
    return {
        "loss": float(found.loss.detach()),
        "grad_logp": packed.take(gradient(x.logprobs)),
        "selected": [[i, t] for i, part in enumerate(chosen) for t, on in enumerate(part) if on],
        "cov": cov[row.mask].tolist(),
    }


def logits(given: Given, dtype: torch.dtype) -> Computed:
    check_keys(given.config, ("temperature",))
    x = given.inputs
    z = vector(x["logits"], dtype).requires_grad_()
    if z.dim() != 2:
        raise Unsupported("inputs.logits is not a matrix")
    lp, entropy = logprob_entropy(
        z,
        torch.tensor(x["targets"], dtype=torch.long),
        vocab_size=z.shape[1],
        temperature=float(given.config.get("temperature", 1.0)),
    )
    torch.autograd.backward(
        [lp, entropy], [vector(x["grad_logp"], dtype), vector(x["grad_entropy"], dtype)]
    )
    return {
        "logp": lp.tolist(),
        "entropy": entropy.tolist(),
        "grad_logits": gradient(z).tolist(),
    }
