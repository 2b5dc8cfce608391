"""A step's samples: prompts dealt out to the collectors, in rounds until enough of them teach.

1. A round is ``prompts_per_step`` prompts, a run of them for each collector; facts of its samples
   are shared with every rank, and what follows is decided from them alike everywhere. The samples
   stay where they were collected.
2. Without dynamic sampling a step is one round. With it (DAPO, arXiv 2503.14476) rounds go on until
   ``prompts_per_step`` groups are informative (``algos/shaping.py``) or ``max_rounds`` are used up.
3. The groups trained on are the first informative ones, by round and position in it, never by what
   finished first. Surplus ones are dropped; missing ones are filled up with uninformative groups of
   the earliest rounds, in which all samples are right or all are wrong.
4. Group labels are unique in a step, and so are seeds, also of a prompt that comes twice.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from megarl.algos.shaping import informative_groups
from megarl.data.exchange import Collected, share_facts
from megarl.data.prompts import PromptStream
from megarl.data.rewards import pad_rewards
from megarl.errors import DataError
from megarl.hostcomm import agree, gather_and_share
from megarl.protocols import Collector
from megarl.rollout.collect import component_metrics
from megarl.types import Known, Max, Mean, Metric, OneOfKnown, Prompt, Rollouts, Sample, StepMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSamples:
    """``samples``: to train on. ``accuracy``: share of right ones among all that were sampled."""

    samples: list[Collected]
    accuracy: float
    metrics: StepMetrics


class Rounds:
    """Samples steps. Methods are collective over ``host``."""

    def __init__(
        self,
        stream: PromptStream,
        collector: Collector | None,
        collectors: Sequence[int],
        host: dist.ProcessGroup,
        *,
        prompts_per_step: int,
        max_rounds: int | None,
    ) -> None:
        """``collector``: this rank's, if it is among ``collectors``. ``max_rounds``: of dynamic
        sampling; None: a step is one round.
        """
        self._stream, self._collector, self._collectors = stream, collector, list(collectors)
        self._host, self._rank = host, dist.get_rank()
        self._prompts_per_step, self._max_rounds = prompts_per_step, max_rounds
        self.reward_names: tuple[str, ...] = ()  # of all collectors; empty until one was scored

    def take(self, step: int, max_new_tokens: int) -> StepSamples:
        """The samples of ``step``; the prompts used have left the stream."""
        sampled: list[Collected] = []
        earlier: list[Prompt] = []
        metrics: StepMetrics = []
        seconds, rounds, teaching = 0.0, 0, 0
        while rounds < (self._max_rounds or 1) and teaching < self._prompts_per_step:
            prompts = self._stream.take(self._prompts_per_step)
            rollouts, samples = self._round(prompts, earlier, step, max_new_tokens)
            sampled += [_relabelled(c, c.facts.group + len(earlier)) for c in samples]
            earlier += prompts
            metrics += rollouts.metrics
            seconds += rollouts.seconds
            rounds += 1
            teaching = sum(_informative([c.facts for c in sampled]).values())
        facts = pad_rewards([c.facts for c in sampled], len(self.reward_names) or 1)
        sampled = [replace(c, facts=f) for c, f in zip(sampled, facts, strict=True)]
        if self._collector is not None:
            metrics.append(Metric("rollout/generate_seconds", Max(seconds)))
        if self._rank == 0:
            metrics += component_metrics(facts, self.reward_names, "rollout")
        if self._max_rounds is not None:
            metrics += _filter_metrics(teaching, len(earlier), rounds)
            if teaching < self._prompts_per_step:
                log.warning(
                    "step %d: %d of %d prompts were informative after %d rounds; %d uninformative "
                    "ones fill the step",
                    *(step, teaching, len(earlier), rounds, self._prompts_per_step - teaching),
                )
        accuracy = sum(f.correct for f in facts) / len(facts)
        chosen = {f.group for f in select_groups(facts, self._prompts_per_step)}
        return StepSamples([c for c in sampled if c.facts.group in chosen], accuracy, metrics)

    def _round(
        self, prompts: Sequence[Prompt], earlier: Sequence[Prompt], step: int, max_new_tokens: int
    ) -> tuple[Rollouts, list[Collected]]:
        """This rank's rollouts, and the samples of every collector in the prompts' order."""
        rollouts = Rollouts([])
        error: Exception | None = None
        if self._collector is not None:
            share = math.ceil(len(prompts) / len(self._collectors))
            first = self._collectors.index(self._rank) * share
            try:
                rollouts = self._collector.collect(
                    prompts[first : first + share],
                    step,
                    max_new_tokens,
                    earlier=[*earlier, *prompts[:first]],
                )
            except Exception as e:
                error = e
            labelled = [replace(s, group=s.group + first) for s in rollouts.samples]
            rollouts = replace(rollouts, samples=labelled)
        agree(error, self._host, "collecting rollouts")
        samples = share_facts(rollouts.samples, self._collectors, self._rank, self._host)
        self._agree_on_names(rollouts)
        return rollouts, samples

    def _agree_on_names(self, mine: Rollouts) -> None:
        """A collector in which no response has ended yet learns the names from the others."""
        scored = next((f"{s.prompt_id}/{s.index}" for s in mine.samples if not s.truncated), None)
        found = gather_and_share([list(mine.reward_names), scored], self._host)
        for rank, (names, sample) in enumerate(found):
            if names and self.reward_names and tuple(names) != self.reward_names:
                raise DataError(
                    f"the reward of sample {sample} (rank {rank}) has the components "
                    f"{', '.join(names)}; accepted: those of the samples before it, "
                    f"{', '.join(self.reward_names)}"
                )
            self.reward_names = tuple(names) or self.reward_names


def select_groups(samples: Sequence[OneOfKnown], count: int) -> list[OneOfKnown]:
    """Samples of ``count`` groups, in their order: the first informative ones, and, where these are
    too few, the first others.
    """
    informative = _informative(samples)
    first = sorted(informative, key=lambda group: not informative[group])  # stable
    chosen = set(first[:count])
    return [s for s in samples if s.group in chosen]


def only_informative(samples: Sequence[Sample], step: int) -> tuple[list[Sample], StepMetrics]:
    """The informative groups of a recorded step; all groups where none is."""
    informative = _informative(samples)
    teaching = sum(informative.values())
    metrics = _filter_metrics(teaching, len(informative), rounds=1)
    if not teaching:
        log.warning("step %d: no prompt of %d is informative; all are kept", step, len(informative))
        return list(samples), metrics
    return [s for s in samples if informative[s.group]], metrics


def _relabelled(collected: Collected, group: int) -> Collected:
    return replace(collected, facts=replace(collected.facts, group=group))


def _informative(samples: Sequence[Known]) -> dict[int, bool]:
    return informative_groups([float(s.correct) for s in samples], [s.group for s in samples])


def _filter_metrics(informative: int, groups: int, rounds: int) -> StepMetrics:
    """Every rank reports the same; a mean and a maximum stay what they are."""
    share = Metric("filter/informative_share", Mean(informative, groups))
    return [share, Metric("filter/rounds", Max(rounds))]
