"""The name table of advantages, and what each writes into the packed rows of a step.

An advantage is of the whole rollout batch: groups, moments and weights know every sample, on every
rank alike, whatever the split. ``share`` brings one JSON value of every rank to all of them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarl.algos.component_advantages import gdpo_advantages, process_advantages
from megarl.algos.group_advantages import Outcomes, group_advantages
from megarl.algos.moments import Moments, merge_moments, whiten
from megarl.algos.token_advantages import at_last_trained, gae
from megarl.config.algo import (
    Advantage,
    DrGrpoAdvantage,
    GaeAdvantage,
    GdpoAdvantage,
    GroupAdvantage,
    ProcessAdvantage,
    ReinforcePpAdvantage,
    ReinforcePpBaselineAdvantage,
)
from megarl.errors import DataError
from megarl.ops import discounted_returns
from megarl.types import Known, PackedBatch

log = logging.getLogger(__name__)
Share = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Batch:
    """A step's samples with their shaped outcomes, and this rank's rows of them (none where the
    last pipeline stage is elsewhere). ``penalty(row)`` f64 [T]: what the divergence from the
    reference takes off every token's reward.
    """

    samples: Sequence[Known]
    outcomes: Outcomes
    rows: Sequence[PackedBatch]
    penalty: Callable[[PackedBatch], torch.Tensor]
    share: Share


def assign_advantages(section: Advantage, batch: Batch) -> None:
    """Fill every row's ``advantages`` (and ``returns``). ``section``: ``algo.advantage``. Every
    rank calls it: some estimators share statistics.
    """
    valid = batch.outcomes.valid
    for row, values in zip(batch.rows, ESTIMATORS[section.name](section, batch), strict=True):
        counts = row.spread(lambda i: float(valid[i])) > 0
        row.advantages = torch.where(counts, values, 0.0).float()


def _of_group(section: GroupAdvantage, batch: Batch) -> list[torch.Tensor]:
    if section.singleton == "zero":
        _warn_without_groups(batch.outcomes)
    values = group_advantages(section, batch.outcomes)
    return [row.spread(lambda i: values[i]) for row in batch.rows]


def _warn_without_groups(outcomes: Outcomes) -> None:
    sizes = [len(members) for members in outcomes.members(outcomes.valid)]
    if max(sizes, default=2) < 2:
        log.warning(
            "none of %d prompts has two samples with a finite reward: there is nothing to compare, "
            "all advantages are 0. Samples of one prompt share Sample.group",
            len(sizes),
        )


def _grpo_process(section: ProcessAdvantage, batch: Batch) -> list[torch.Tensor]:
    rewards, ends = _steps(batch.samples)
    lengths = [s.length for s in batch.samples]
    values = process_advantages(section, rewards, ends, lengths, batch.outcomes.groups.tolist())
    return [row.spread(lambda i: values[i]) for row in batch.rows]


def _gdpo(section: GdpoAdvantage, batch: Batch) -> list[torch.Tensor]:
    counts = {len(s.rewards) for s in batch.samples}
    if len(counts) > 1:
        raise DataError(f"samples with {sorted(counts)} reward components; accepted: as many each")
    if all(s.truncated for s in batch.samples):  # nothing was scored: no component is known yet
        return [torch.zeros(len(row.mask), dtype=torch.float64) for row in batch.rows]
    if section.weights is not None and counts and len(section.weights) not in counts:
        raise DataError(
            f"algo.advantage.weights has {len(section.weights)} numbers, the samples have "
            f"{counts.pop()} reward components"
        )
    _warn_without_groups(batch.outcomes)
    components = np.array([s.rewards for s in batch.samples], np.float64).T
    values = gdpo_advantages(section, components.tolist(), batch.outcomes)
    return [row.spread(lambda i: values[i]) for row in batch.rows]


def _reinforce_pp(section: ReinforcePpAdvantage, batch: Batch) -> list[torch.Tensor]:
    return whitened(reinforce_pp_returns(section, batch), batch)


def reinforce_pp_returns(section: ReinforcePpAdvantage, batch: Batch) -> list[torch.Tensor]:
    """REINFORCE++'s advantages before they are whitened."""
    return [
        discounted_returns(rewards, row.mask, row.cu_seqlens, gamma=section.gamma)
        for row, rewards in zip(batch.rows, _token_rewards(batch), strict=True)
    ]


def _reinforce_pp_baseline(
    section: ReinforcePpBaselineAdvantage, batch: Batch
) -> list[torch.Tensor]:
    return whitened(centred_rewards(batch), batch)


def centred_rewards(batch: Batch) -> list[torch.Tensor]:
    """REINFORCE++-baseline's advantages before they are whitened."""
    return _of_group(DrGrpoAdvantage(), batch)


def _gae(section: GaeAdvantage, batch: Batch) -> list[torch.Tensor]:
    found, valid = [], batch.outcomes.valid
    for row, rewards in zip(batch.rows, _token_rewards(batch), strict=True):
        if row.values is None:
            raise DataError(
                "algo.advantage.name=gae needs values, and the recorded samples have none"
            )
        last = {i: start + length - 1 for i, start, length in row.segments()}
        goes_on = section.bootstrap_truncated & batch.outcomes.truncated
        after = {i: float(row.values[last[i]]) if goes_on[i] else 0.0 for i in row.samples}
        advantages, returns = gae(
            rewards,
            row.values,
            row.mask,
            row.cu_seqlens,
            row.of_segments(after),
            gamma=section.gamma,
            lam=section.lam,
            masked_reward=section.masked_reward,
        )
        # without a reward there is nothing to learn: the value stays what it was
        unknown = row.mask & (row.spread(lambda i: float(valid[i])) == 0)
        row.returns = torch.where(unknown, row.values, returns.float())
        found.append(advantages)
    return whitened(found, batch) if section.whiten else found


ESTIMATORS: dict[str, Callable[[Any, Batch], list[torch.Tensor]]] = {
    "grpo": _of_group,
    "dr_grpo": _of_group,
    "rloo": _of_group,
    "grpo_loo": _of_group,
    "opo": _of_group,
    "gpg": _of_group,
    "grpo_process": _grpo_process,
    "gdpo": _gdpo,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "gae": _gae,
}


def whitened(values: Sequence[torch.Tensor], batch: Batch) -> list[torch.Tensor]:
    """Mean 0, variance 1 over the trained tokens of all ranks. Samples whose reward is not finite
    take no part and get 0; neither do tokens without a finite value, which stay what they are.
    """
    total = moments_of(values, batch)
    return [whiten(v, mask, total) for v, mask in zip(values, _counted(batch), strict=True)]


def moments_of(values: Sequence[torch.Tensor], batch: Batch) -> Moments:
    """Of what ``whitened`` counts. Collective."""
    masks = _counted(batch)
    parts = [Moments.of(v, mask & v.isfinite()) for v, mask in zip(values, masks, strict=True)]
    everywhere = batch.share([[p.n, p.mean, p.m2] for p in parts])
    return merge_moments(Moments(*part) for rank in everywhere for part in rank)


def _counted(batch: Batch) -> list[torch.Tensor]:
    """bool [T] a row: trained tokens of samples with a finite reward."""
    valid = batch.outcomes.valid
    return [row.mask & (row.spread(lambda i: float(valid[i])) > 0) for row in batch.rows]


def _token_rewards(batch: Batch) -> list[torch.Tensor]:
    """f64 [T] a row: the outcome at the last trained token, step rewards where the steps end, minus
    the penalty.
    """
    outcomes = np.where(batch.outcomes.valid, batch.outcomes.rewards, 0.0).tolist()
    rewards = []
    for row in batch.rows:
        found = at_last_trained(row.of_segments(outcomes), row.mask, row.cu_seqlens)
        for i, start, _ in row.segments():
            sample = batch.samples[i]
            if sample.step_rewards is not None and sample.step_ends is not None:
                ends = torch.from_numpy(sample.step_ends).long() + start - 1
                found.index_add_(0, ends, torch.from_numpy(sample.step_rewards).double())
        rewards.append(found - torch.where(row.mask, batch.penalty(row), 0.0))
    return rewards


def _steps(samples: Sequence[Known]) -> tuple[list[list[float]], list[list[int]]]:
    """A sample without steps, such as one that never ended, has none. Raises DataError where no
    finished sample of the batch has any.
    """
    finished = [s for s in samples if not s.truncated]
    if finished and not any(s.step_rewards is not None for s in finished):
        raise DataError(
            f"none of {len(finished)} finished samples has step rewards, e.g. {finished[0].name}; "
            "algo.advantage.name=grpo_process needs a reward a step (types.Scored.steps)"
        )
    rewards, ends = [], []
    for sample in samples:
        there = sample.step_rewards is not None and sample.step_ends is not None
        rewards.append(sample.step_rewards.tolist() if there else [])  # type: ignore[union-attr]
        ends.append(sample.step_ends.tolist() if there else [])  # type: ignore[union-attr]
    return rewards, ends
