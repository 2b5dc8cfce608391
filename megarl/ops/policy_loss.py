"""The policy loss of a packed row, its gradient and its metrics, in one pass over the tokens.

Shapes: T tokens on this rank, S sequences. ::

    loss = sum_t w_t [ omega_t o_i l_t + kl_coef k_t - entropy_coef H_t ]

Every part, with its source, is specified in torch by ``algos/objective.py`` (l in its
``surrogates*.py``, k in ``kl.py``), which is the reference of this op: an objective's row is the
same, to rounding, whichever of the two computes it. The kernels' mathematics is one header for CPU
and CUDA, csrc/policy_math.h.

1. ``policy_sums``: what decides about whole sequences, summed over the tokens that are here. Where
   a row is split over context-parallel ranks they are all-reduced in between.
2. ``policy_loss``: gradients and totals; with the sums of pass 1, or finding them on its way.
3. Tokens that are masked, or not finite in what the loss reads, contribute exact zeros, whatever
   they hold. One that is trained and not finite is counted; an objective of whole sequences drops
   its sequence.
4. Sums are float64, in fixed blocks: no bit depends on the number of threads or the width of the
   CPU's vectors. On a CPU what is only reported (counts, means of ratios and of the entropy) is
   first added up 8 tokens at a time in the row's own type.

The outputs are data, with no gradient of their own: the loss that autograd sees is built from them
(``algos/objective.py``), its backward pass being one multiplication.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.ops._arguments import check_device
from megarl.ops._native import count_call, native_devices
from megarl.ops._selfcheck import self_check

# In the order of csrc/policy_math.h.
OBJECTIVES = (
    "reinforce",
    "sft",
    "ppo_clip",
    "cispo",
    "sapo",
    "aspo",
    "minirl",
    "kl_cov",
    "gspo",
    "gspo_token",
    "gmpo",
)
KL_TYPES = ("", "k1", "k2", "k3", "k3+")
KL_WEIGHTS = ("none", "old", "self")
OPSM = ("", "old", "rollout")
PARAMETERS = (
    "low",
    "high",
    "log_low",
    "log_high",
    "wide_low",
    "wide_high",
    "cap",
    "floor",
    "tau_pos",
    "tau_neg",
    "penalty",
    "kl_coef",
    "kl_input_clamp",
    "kl_output_clamp",
    "entropy_coef",
    "opsm_delta",
)
SUMS = (
    "count",
    "log_ratio",
    "positive",
    "negative",
    "dropped",
    "gap",
    "advantage",
    "clipped_log_ratio",
    "square",
    "distance",
)
TOTALS = (
    "tokens",
    "dropped",
    "pg_loss",
    "kl_loss",
    "entropy_loss",
    "entropy",
    "kl",
    "approx_kl_k1",
    "approx_kl_k3",
    "ratio",
    "ratio_sq",
    "ratio_clamped",
    "flag0",
    "flag1",
    "flag2",
    "flag3",
    "mean",
    "ratio_min",
    "ratio_max",
)


@dataclass(frozen=True)
class PolicyTerms:
    """What is computed. ``parameters``: names of ``PARAMETERS``, 0 where absent; infinite for a
    bound that is none. ``all_metrics``: off, only losses, clip fractions and the mean log-ratio
    are summed; the further totals are 0, the extremes infinite.
    """

    objective: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    kl_type: str = ""
    kl_weight: str = "none"
    opsm: str = ""
    all_metrics: bool = True

    @property
    def reads_entropy(self) -> bool:
        return self.all_metrics or bool(self.parameters.get("entropy_coef"))

    def codes(self) -> tuple[Tensor, int, int, int, int, bool]:
        """As the kernels take them. ValueError for a name that is none."""
        unknown = set(self.parameters) - set(PARAMETERS)
        if unknown:
            raise ValueError(f"policy_loss: parameters {sorted(unknown)}; accepted: {PARAMETERS}")
        numbers = [float(self.parameters.get(name, 0.0)) for name in PARAMETERS]
        return (
            torch.tensor(numbers, dtype=torch.float64),
            _code("objective", self.objective, OBJECTIVES),
            _code("kl_type", self.kl_type, KL_TYPES),
            _code("kl_weight", self.kl_weight, KL_WEIGHTS),
            _code("opsm", self.opsm, OPSM),
            self.all_metrics,
        )


def _code(what: str, name: str, accepted: tuple[str, ...]) -> int:
    if name not in accepted:
        raise ValueError(f"policy_loss: {what} {name!r}; accepted: {accepted}")
    return accepted.index(name)


@dataclass(frozen=True)
class PolicyRow:
    """f32 or f64 [T], all of one type; masks bool [T]; ``cu_seqlens`` i32 or i64 [S + 1]. What the
    terms do not read may be None. ``weight`` and ``correction`` are 0 or more.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weight: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    rollout_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    correction: Tensor | None = None
    entropy: Tensor | None = None
    selected: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (
            self.logprobs,
            self.old_logprobs,
            self.advantages,
            self.weight,
            self.mask,
            self.cu_seqlens,
            self.rollout_logprobs,
            self.ref_logprobs,
            self.correction,
            self.entropy,
            self.selected,
        )


class PolicyLoss(NamedTuple):
    """``grad_logprobs`` [T]: d loss / d lp. ``grad_entropy``: [T], empty without an entropy term.
    ``sums`` f64 [len(SUMS), S]; ``totals`` f64 [len(TOTALS)], of this rank's tokens.
    """

    grad_logprobs: Tensor
    grad_entropy: Tensor
    sums: Tensor
    totals: Tensor


@torch.no_grad()
def policy_sums(row: PolicyRow, terms: PolicyTerms) -> Tensor:
    """f64 [len(SUMS), S]: of the tokens that are here. RuntimeError as ``policy_loss``."""
    count_call("policy_sums", native=True)
    out: Tensor = torch.ops.megarl.policy_sums(*row.tensors(), *terms.codes())
    return out


@torch.no_grad()
def policy_loss(row: PolicyRow, terms: PolicyTerms, sums: Tensor | None = None) -> PolicyLoss:
    """``sums``: of the whole sequences; None where the row holds them whole.

    RuntimeError, with the numbers, for shapes, types, devices and bounds that are not as said, and
    for a row that lacks what the terms read.
    """
    return PolicyLoss(*torch.ops.megarl.policy_loss(*row.tensors(), *terms.codes(), sums))


def _fake_sums(logprobs: Tensor, *rest: Any) -> Tensor:
    _check_devices("policy_sums", logprobs, *rest)
    cu_seqlens = rest[4]
    return logprobs.new_empty((len(SUMS), cu_seqlens.shape[0] - 1), dtype=torch.float64)


def _fake_loss(logprobs: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_devices("policy_loss", logprobs, *rest)
    # Whether there is an entropy term is a number in a tensor, which a fake one does not have.
    context = torch.library.get_ctx()
    return (
        logprobs.new_empty(logprobs.shape),
        logprobs.new_empty(context.new_dynamic_size()),
        _fake_sums(logprobs, *rest),
        logprobs.new_empty(len(TOTALS), dtype=torch.float64),
    )


def _check_devices(op: str, logprobs: Tensor, *rest: Any) -> None:
    """A row with one tensor on no device runs here, whatever its others are."""
    for field_, x in zip(fields(PolicyRow)[1:], rest, strict=False):
        if x is not None:
            check_device(op, field_.name, x, logprobs)


if native_devices("policy_loss"):
    torch.library.register_fake("megarl::policy_sums", _fake_sums)
    torch.library.register_fake("megarl::policy_loss", _fake_loss)


@self_check("policy_loss")
def _check(device: torch.device) -> None:
    """Against the CPU's kernel, which the tests compare with the reference; the totals' order of
    additions is another.
    """
    for objective, few in itertools.product(OBJECTIVES, (False, True)):
        row, terms = sample_row(objective)
        if few:
            terms = replace(terms, kl_type="", opsm="", all_metrics=False)
        here, there = policy_loss(row, terms), policy_loss(_moved(row, device), terms)
        for expected, found in zip(here, there, strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=2e-6, atol=1e-9)
        sums = policy_sums(_moved(row, device), terms)
        torch.testing.assert_close(sums.cpu(), policy_sums(row, terms), rtol=1e-9, atol=1e-9)
        again = policy_loss(_moved(row, device), terms, sums)
        torch.testing.assert_close(again.grad_logprobs, there.grad_logprobs, rtol=0, atol=0)


def _moved(row: PolicyRow, device: torch.device) -> PolicyRow:
    moved = {k: None if v is None else v.to(device) for k, v in vars(row).items()}
    return PolicyRow(**moved)  # type: ignore[arg-type]


def sample_row(
    objective: str, num_tokens: int = 5000, seed: int = 0
) -> tuple[PolicyRow, PolicyTerms]:
    """A row that exercises every term, for checks of a device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(num_tokens, generator=generator) * scale

    old = -normal(1.0).abs()
    row = PolicyRow(
        logprobs=old + normal(0.2),
        old_logprobs=old,
        advantages=normal(1.0),
        weight=torch.rand(num_tokens, generator=generator) / num_tokens,
        mask=torch.rand(num_tokens, generator=generator) < 0.8,
        cu_seqlens=torch.tensor([0, 1, 1, 300, num_tokens - 1000, num_tokens], dtype=torch.int32),
        rollout_logprobs=old + normal(0.05),
        ref_logprobs=old + normal(0.3),
        correction=torch.rand(num_tokens, generator=generator),
        entropy=normal(1.0).abs(),
        selected=torch.rand(num_tokens, generator=generator) < 0.1,
    )
    parameters = dict(low=0.8, high=1.2, log_low=math.log(0.98), log_high=math.log(1.02))
    parameters |= dict(wide_low=0.6, wide_high=1.4, cap=2.0, floor=0.0, tau_pos=1.0, tau_neg=1.05)
    parameters |= dict(penalty=1.0, kl_coef=0.1, kl_input_clamp=20.0, kl_output_clamp=10.0)
    parameters |= dict(entropy_coef=0.01, opsm_delta=0.01)
    return row, PolicyTerms(objective, parameters, "k3", "old", "rollout")
