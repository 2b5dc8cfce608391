"""What workers do in tests of objectives: each evaluates its context-parallel share of a row."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.config.algo import KlSection, OpsmSection
from megarl.data.packing import local_index
from megarl.types import Coefficients, LossInputs
from tests.algos.ragged import policy

Case = tuple[dict[str, Any], dict[str, torch.Tensor]]  # policy settings, whole row
KL = KlSection(type="k3", coef=0.5)
OPSM = OpsmSection(delta=-0.2, against="rollout")


def shares(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """For every case this rank's part, computed together with the others."""
    return [_share(rank, settings, row, dist.group.WORLD) for settings, row in cases]


def shares_of_all_terms(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """As ``shares``, of an objective with divergence, entropy bonus and off-policy masking."""
    return [_share(rank, settings, row, dist.group.WORLD, True) for settings, row in cases]


def every_term(settings: Mapping[str, Any]) -> Objective:
    return Objective(policy(**settings), KL, OPSM)


COEFFICIENTS = Coefficients(kl=0.5, entropy=0.25)


def lonely_shares(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """The same without communication: what a missing reduction would give."""
    return [_share(rank, settings, row, None) for settings, row in cases]


def collectives(rank: int, case: Case) -> list[str]:
    """What the group does while a loss and its gradient are computed."""
    settings, row = case
    with torch.autograd.profiler.profile() as profile:
        _share(rank, settings, row, dist.group.WORLD)
    return [event.name for event in profile.function_events if event.name.startswith("gloo:")]


def _share(
    rank: int,
    settings: Mapping[str, Any],
    row: Mapping[str, torch.Tensor],
    group: Any,
    all_terms: bool = False,
) -> dict[str, Any]:
    cp = dist.get_world_size()
    index = local_index(tuple(row["cu_seqlens"].tolist()), cp, rank)
    fields = {name: values[index] for name, values in row.items() if name != "cu_seqlens"}
    logprobs = fields["logprobs"].requires_grad_()
    inputs = LossInputs(**fields)
    segments = Segments(row["cu_seqlens"] // cp, group)
    if all_terms:
        loss, metrics, dropped = every_term(settings)(inputs, segments, COEFFICIENTS)
    else:
        loss, metrics, dropped = Objective(policy(**settings))(inputs, segments)
    loss.backward()
    grad = torch.zeros_like(row["logprobs"])
    grad[index] = logprobs.grad
    return {
        "loss": loss.detach(),
        "grad": grad,
        "metrics": metrics,
        "index": index,
        "dropped": index[dropped],
    }
