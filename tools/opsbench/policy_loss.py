"""The policy loss of packed rows, forward and backward with its metrics.

Alternatives: ``padded``, on rectangles [B, T] with masks, the operations of verl's
``compute_policy_loss_*`` (three metrics); ``loop``, a sample at a time as slime's loss has it;
``reference``, our own in torch (all metrics).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import megarl.algos.objective as objective_module
from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.config.policies import GspoPolicy, PpoClipPolicy, SapoPolicy
from megarl.types import LossInputs
from opsbench.measure import Row, best_times, copy_call, ragged_lengths, threads

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, float]]]


@dataclass(frozen=True)
class Data:
    """Rows [T] of sequences of ``lengths``, all of whose tokens are trained."""

    lengths: list[int]
    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weight: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, num_tokens: int) -> "Data":
        generator = torch.Generator().manual_seed(1)
        lengths = ragged_lengths(num_tokens)
        sizes = torch.tensor(lengths)
        old = -torch.rand(num_tokens, generator=generator) * 2
        logprobs = old + torch.randn(num_tokens, generator=generator) * 1e-2
        return cls(
            lengths,
            logprobs,
            old,
            torch.randn(len(lengths), generator=generator).repeat_interleave(sizes),
            (1.0 / (len(lengths) * sizes.double())).float().repeat_interleave(sizes),
            torch.rand(num_tokens, generator=generator),
        )

    def packed(self) -> tuple[LossInputs, Segments]:
        bounds = torch.tensor([0, *self.lengths]).cumsum(0).int()
        inputs = LossInputs(
            logprobs=self.logprobs.clone().requires_grad_(),
            entropy=self.entropy,
            old_logprobs=self.old_logprobs,
            rollout_logprobs=self.old_logprobs,
            advantages=self.advantages,
            weight=self.weight,
            mask=torch.ones(len(self.logprobs), dtype=torch.bool),
        )
        return inputs, Segments(bounds)

    def padded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts = (self.old_logprobs, self.logprobs, self.advantages, torch.ones_like(self.weight))
        old, new, a, mask = (pad_sequence(p.split(self.lengths), batch_first=True) for p in parts)
        return old, new.requires_grad_(), a, mask

    def samples(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        parts = (self.old_logprobs, self.logprobs, self.advantages, torch.ones_like(self.weight))
        old, new, a, mask = (p.split(self.lengths) for p in parts)
        leaves = [x.clone().requires_grad_() for x in new]
        return [x for x in zip(old, leaves, a, mask, strict=True)]


# --- the padded form


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (torch.where(mask.bool(), values, 0.0) * mask).sum() / (mask.sum() + 1e-8)


def mean_of_means(losses: Tensor, mask: Tensor) -> Tensor:
    """seq-mean-token-mean."""
    counts = mask.sum(-1)
    means = (losses * mask).sum(-1) / (counts + 1e-8)
    there = (counts > 0).float()
    return (torch.where(there.bool(), means, 0.0) * there).sum() / there.sum()


def gspo(old: Tensor, new: Tensor, a: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    d = new - old
    mean = (d * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    log_ratio = (new - new.detach() + mean.detach().unsqueeze(-1)).clamp(max=10.0)
    ratio = log_ratio.exp()
    free, held = -a * ratio, -a * ratio.clamp(1 - 3e-4, 1 + 4e-4)
    loss = mean_of_means(torch.maximum(free, held), mask)
    metrics = {
        "clipfrac": masked_mean((held > free).float(), mask).detach().item(),
        "kl": masked_mean(-d, mask).detach().item(),
        "clipfrac_lower": torch.tensor(0.0).item(),
    }
    return loss, metrics


def sapo(old: Tensor, new: Tensor, a: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    d = (new - old).clamp(-20.0, 20.0)
    ratio = d.exp()
    tau = torch.where(a > 0, torch.tensor(1.0), torch.tensor(1.05))
    gates = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    loss = mean_of_means(-gates * a, mask)
    nothing = torch.tensor(0.0)
    kl = masked_mean(-d, mask).detach().item()
    return loss, {"clipfrac": nothing.item(), "kl": kl, "clipfrac_lower": nothing.item()}


def ppo(old: Tensor, new: Tensor, a: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    d = (new - old).clamp(-20.0, 20.0)
    ratio = d.exp()
    kl = masked_mean(-d, mask)
    free, held = -a * ratio, -a * ratio.clamp(0.8, 1.2)
    clipped = torch.maximum(free, held)
    capped = torch.min(-a * 3.0, clipped)
    losses = torch.where(a < 0, capped, clipped)
    lower = masked_mean(torch.gt(clipped, -a * 3.0) * (a < 0).float(), mask)
    metrics = {
        "clipfrac": masked_mean((held > free).float(), mask).detach().item(),
        "kl": kl.detach().item(),
        "clipfrac_lower": lower.detach().item(),
    }
    return mean_of_means(losses, mask), metrics


@dataclass(frozen=True)
class Case:
    """``bytes_a_token`` the op must touch: rows of f32 read, the mask, one gradient written."""

    policy: Any
    padded: Loss
    all_metrics: bool
    bytes_a_token: int


# 4 rows read and 1 written, the mask; with all metrics the entropy too
CASES = {
    "gspo_3metrics": Case(GspoPolicy(), gspo, False, 4 * 5 + 1),
    "gspo": Case(GspoPolicy(), gspo, True, 4 * 6 + 1),
    "sapo": Case(SapoPolicy(), sapo, True, 4 * 6 + 1),
    "ppo": Case(PpoClipPolicy(dual_clip=3.0), ppo, True, 4 * 6 + 1),
}


def gradient(loss: Tensor, *of: Tensor) -> None:
    """Backward as in training, where log-probs are no leaves: nothing is added to a ``grad``."""
    torch.autograd.grad(loss, of)


def packed_call(case: Case, data: Data, native: bool) -> Callable[[], None]:
    inputs, segments = data.packed()
    objective = Objective(case.policy, all_metrics=case.all_metrics)

    def call() -> None:
        chosen = objective_module.runs_native
        if not native:
            objective_module.runs_native = lambda op, device: False
        try:
            gradient(objective(inputs, segments).loss, inputs.logprobs)
        finally:
            objective_module.runs_native = chosen

    return call


def padded_call(case: Case, data: Data) -> Callable[[], None]:
    batch = data.padded()

    def call() -> None:
        gradient(case.padded(*batch)[0], batch[1])

    return call


def loop_call(case: Case, data: Data) -> Callable[[], None]:
    samples = data.samples()

    def call() -> None:
        losses = []
        for old, new, a, mask in samples:
            losses.append(case.padded(old[None], new[None], a[None], mask[None])[0])
        gradient(torch.stack(losses).sum() / len(losses), *(new for _, new, _, _ in samples))

    return call


def rows(quick: bool) -> Iterator[Row]:
    sizes = [1 << 15] if quick else [1 << 20, 1 << 24]
    for num_tokens in sizes:
        data = Data.of(num_tokens)
        for name, case in CASES.items():
            for count in (1, 2):
                with threads(count):
                    yield measured(name, case, data, num_tokens)


def measured(name: str, case: Case, data: Data, num_tokens: int) -> Row:
    num_bytes = case.bytes_a_token * num_tokens
    calls = {
        "native": packed_call(case, data, native=True),
        "copy": copy_call(num_bytes),
        "reference": packed_call(case, data, native=False),
        "padded": padded_call(case, data),
    }
    if num_tokens <= 1 << 20:
        calls["loop"] = loop_call(case, data)
    times = best_times(calls, rounds=7)
    ours = times["native"]
    return Row(
        "policy_loss",
        name,
        num_tokens,
        torch.get_num_threads(),
        vs_padded=times["padded"] / ours,
        vs_loop=times["loop"] / ours if "loop" in times else None,
        vs_reference=times["reference"] / ours,
        copy_bandwidth_fraction=times["copy"] / ours,
        seconds=ours,
    )
