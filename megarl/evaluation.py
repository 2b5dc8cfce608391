"""Answers to prompts that are never trained on: the held-out ones, greedy, and those of
``eval.sets``, as they say; at the start, every so many steps and at the end. Servers come and go
meanwhile as they do in a step.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import torch.distributed as dist

from megarl.config.evaluation import EvalSet
from megarl.config.schema import Config
from megarl.hostcomm import agree, any_rank
from megarl.protocols import Collector
from megarl.servers import Servers
from megarl.sync.asking import in_background
from megarl.types import Prompt, Sampling, StepMetrics

log = logging.getLogger(__name__)

_POLL_S = 1.0  # at most so long nobody looks at the servers


class Evaluations:
    """``rank`` of the gloo group ``host``: rank 0 asks, all hear of a failure. ``load``: the
    prompts of a file that leave room for responses of so many tokens.
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        host: dist.ProcessGroup,
        load: Callable[[Path, int], list[Prompt]],
    ) -> None:
        self.config, self.rank, self.host = config, rank, host
        heldout = config.data.heldout if config.eval.every else None
        longest = config.eval.max_new_tokens
        self.heldout = load(heldout, longest) if heldout is not None else []
        self.sets = [
            (chosen, load(chosen.prompts, chosen.max_new_tokens or longest))
            for chosen in config.eval.sets
        ]

    def run(
        self,
        collector: Collector | None,
        servers: Servers,
        step: int,
        stopping: Callable[[], bool] = lambda: False,
    ) -> StepMetrics:
        """Of the evaluations that are due after ``step``, on rank 0; none where they would keep a
        run that is ``stopping`` (this rank's word) from saving in time. Collective.
        """
        every = self.config.eval.every
        heldout = self.heldout if self._due(every, step) else []
        due = [own for own in self.sets if self._due(own[0].every or every, step)]
        if not (heldout or due):
            return []
        asked: Future[StepMetrics] | None = None
        if self.rank == 0:
            assert collector is not None, "rank 0 leads its node"
            asked = in_background(self._ask, collector, heldout, due)
        self._follow(asked, collector, servers, stopping)
        metrics: StepMetrics = []
        error: BaseException | None = None
        if asked is not None and not asked.done():
            log.warning("stopping: step %d is not evaluated", step)
        elif asked is not None and (error := asked.exception()) is None:
            metrics = asked.result()
        agree(error, self.host, "held-out evaluation")
        return metrics

    def _ask(
        self,
        collector: Collector,
        heldout: Sequence[Prompt],
        due: Sequence[tuple[EvalSet, list[Prompt]]],
    ) -> StepMetrics:
        metrics: StepMetrics = []
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
        return metrics

    def _follow(
        self,
        asked: "Future[StepMetrics] | None",
        collector: Collector | None,
        servers: Servers,
        stopping: Callable[[], bool],
    ) -> None:
        """Until what is asked has ended, or half of a stop's grace: the rest is for saving.
        Collective. Raises ServerError where no server is left.
        """
        end = float("inf")
        while True:
            if asked is not None:
                wait([asked], timeout=_POLL_S)
            if stopping():
                end = min(end, time.monotonic() + self.config.run.stop_grace_s / 2)
            over = asked is not None and (asked.done() or time.monotonic() >= end)
            if any_rank(over, self.host):
                return
            servers.refresh({} if collector is None else collector.suspects())
            if not servers.serving:
                servers.require(lambda: any_rank(stopping(), self.host))

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
