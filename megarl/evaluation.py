"""Answers to prompts that are never trained on: the held-out ones, greedy, and those of
``eval.sets``, as they say; at the start, every so many steps and at the end.
"""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megarl.config.evaluation import EvalSet
from megarl.config.schema import Config
from megarl.hostcomm import agree
from megarl.protocols import Collector
from megarl.types import Prompt, Sampling, StepMetrics


class Evaluations:
    """``rank`` of the gloo group ``host``: rank 0 asks, all hear of a failure."""

    def __init__(
        self,
        config: Config,
        rank: int,
        host: dist.ProcessGroup,
        load: Callable[[Path], list[Prompt]],
    ) -> None:
        self.config, self.rank, self.host = config, rank, host
        heldout = config.data.heldout if config.eval.every else None
        self.heldout = load(heldout) if heldout is not None else []
        self.sets = [(chosen, load(chosen.prompts)) for chosen in config.eval.sets]

    def run(self, collector: Collector | None, step: int) -> StepMetrics:
        """Of the evaluations that are due after ``step``, on rank 0. Collective."""
        every = self.config.eval.every
        heldout = self.heldout if self._due(every, step) else []
        due = [own for own in self.sets if self._due(own[0].every or every, step)]
        if not (heldout or due):
            return []
        metrics: StepMetrics = []
        error: Exception | None = None
        if self.rank == 0 and collector is not None:
            try:
                longest = self.config.eval.max_new_tokens
                if heldout:
                    metrics += collector.evaluate(heldout, Sampling(0.0, longest), area="eval")
                for chosen, prompts in due:
                    metrics += collector.evaluate(
                        prompts,
                        _sampling(chosen, longest),
                        area=f"eval/{chosen.name}",
                        samples_per_prompt=chosen.samples_per_prompt,
                        pass_at=chosen.pass_at,
                    )
            except Exception as e:
                error = e
        agree(error, self.host, "held-out evaluation")
        return metrics

    def _due(self, every: int, step: int) -> bool:
        return bool(every) and (step % every == 0 or step == self.config.run.steps)


def _sampling(chosen: EvalSet, longest: int) -> Sampling:
    return Sampling(
        temperature=chosen.temperature,
        max_new_tokens=chosen.max_new_tokens or longest,
        top_p=chosen.top_p,
        top_k=chosen.top_k or -1,
        min_p=chosen.min_p,
    )
