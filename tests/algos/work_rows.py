"""What workers do in tests of objectives: each evaluates its context-parallel share of a row."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.attention_packed import local_index
from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.types import LossInputs
from tests.algos.ragged import policy

Case = tuple[dict[str, Any], dict[str, torch.Tensor]]  # policy settings, whole row


def shares(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For every case this rank's part, computed together with the others."""
    return [_share(rank, settings, row, dist.group.WORLD) for settings, row in cases]


def lonely_shares(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """The same without communication: what a missing reduction would give."""
    return [_share(rank, settings, row, None) for settings, row in cases]


def _share(
    rank: int, settings: Mapping[str, Any], row: Mapping[str, torch.Tensor], group: Any
) -> dict[str, Any]:
    cp = dist.get_world_size()
    index = local_index(tuple(row["cu_seqlens"].tolist()), cp, rank)
    fields = {name: values[index] for name, values in row.items() if name != "cu_seqlens"}
    logprobs = fields["logprobs"].requires_grad_()
    inputs = LossInputs(**fields)
    loss, metrics = Objective(policy(**settings))(inputs, Segments(row["cu_seqlens"] // cp, group))
    loss.backward()
    grad = torch.zeros_like(row["logprobs"])
    grad[index] = logprobs.grad
    return {"loss": loss.detach(), "grad": grad, "metrics": metrics, "index": index}


def log_softmax(rank: int, inputs: dict[str, Any], temperature: float) -> dict[str, torch.Tensor]:
    """Log-probs and entropy of logits over this group's columns, and a gradient mixed of both."""
    from megarl.actor.logprobs import logprob_and_entropy

    logits = torch.tensor(inputs["logits"]).requires_grad_()
    lp, entropy = logprob_and_entropy(
        logits,
        torch.tensor(inputs["targets"]),
        vocab_size=logits.shape[1],
        temperature=temperature,
        group=dist.group.WORLD,
    )
    mixed = lp @ torch.tensor(inputs["grad_logp"]) + entropy @ torch.tensor(inputs["grad_entropy"])
    mixed.backward()
    return {"logp": lp.detach(), "entropy": entropy.detach(), "grad_logits": logits.grad}
