"""Which prompts are asked for, and which of the groups that come back a step trains on.

A group is a prompt with ``samples_per_prompt`` samples; its serial counts groups over the whole
run. Every rank knows the facts of every group and decides alike; samples stay with the rank that
collected them. Methods are collective over ``host`` unless said.

1. A step wants ``prompts_per_step`` groups. It first asks for as many as are missing, times
   ``rollout.over_sampling``; with dynamic sampling (DAPO, arXiv:2503.14476) in up to ``max_rounds``
   rounds, until so many are informative (``algos/shaping.py``).
2. ``rollout.schedule`` says when: before a step (synchronous), before the step before trains, to be
   whole when it has (one_step_off), or as many ahead as ``max_staleness`` lets be of use
   (asynchronous).
3. A step trains the first groups it may, by serial. Where nothing is taken before all have ended
   (no over-sampling, not asynchronous), they are the same whatever ends first.
4. What a step does not train waits for the next one. A group of which a token is older than
   ``max_staleness`` versions is discarded. Groups that are missing in the end are filled up with
   uninformative ones; the others of these are filtered out.
5. Every group ends in the books (``books.py``), once.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.books import EXPIRED, FAILED, FILTERED, TRAINED, Books
from megarl.data.exchange import Collected, share_facts
from megarl.data.prompts import PromptStream
from megarl.data.rewards import pad_rewards
from megarl.errors import DataError, ServerError
from megarl.hostcomm import agree, gather_and_share
from megarl.informative import filter_metrics, informative
from megarl.protocols import Collector
from megarl.rollout.seeds import sample_seeds
from megarl.rollout.statistics import component_metrics, effort_metrics, rollout_metrics
from megarl.schedule import CollectionSettings
from megarl.servers import Servers
from megarl.staleness import oldest_version, staleness_metrics
from megarl.stock import Stock
from megarl.types import (
    GroupOutcome,
    GroupRequest,
    Max,
    Member,
    Metric,
    Prompt,
    Sampling,
    StepMetrics,
)

log = logging.getLogger(__name__)

_POLL_S = 1.0  # at most so long ranks wait for each other's collectors
_TELL_S = 60.0  # between words about a step that waits


@dataclass(frozen=True)
class StepSamples:
    """``samples``: to train on. ``accuracy``: share of right ones among all that came in since the
    step before.
    """

    samples: list[Collected]
    accuracy: float
    metrics: StepMetrics


class Collection:
    def __init__(
        self,
        stream: PromptStream,
        collector: Collector | None,
        collectors: Sequence[int],
        host: dist.ProcessGroup,
        servers: Servers,
        books: Books,
        settings: CollectionSettings,
    ) -> None:
        """``collector``: this rank's, if it is among ``collectors``."""
        self._stream, self._collector, self._collectors = stream, collector, list(collectors)
        self._host, self._rank = host, dist.get_rank()
        self._servers, self._books, self._settings = servers, books, settings
        self.reward_names: tuple[str, ...] = ()  # of all collectors; empty until one was scored
        self.max_new_tokens = 0  # of the groups issued from now on
        self.version = 0  # of the weights that servers have
        self._stock = Stock()
        self._step = 0  # that prompts were last asked for
        self._rounds, self._asked = 0, list[Prompt]()  # for it
        self._failed = 0  # groups, in the step
        self._efforts: list[GroupOutcome] = []  # of this collector, since the step before
        self._seconds = 0.0

    # ---- a step ------------------------------------------------------------------------------

    def take(self, step: int, stopping: Callable[[], bool] = lambda: False) -> StepSamples | None:
        """The samples that ``step`` trains on; servers have the weights of the step before.
        ``stopping``, collective: whether the run is to end. Then, where they are not there yet,
        None: what there is stays, and is part of ``state``.
        """
        self.version = step - 1
        if not self._collect(step, stopping):
            return None
        stock = self._stock
        came = [c.facts for serial in sorted(stock.came) for c in stock.ready[serial]]
        came = pad_rewards(came, len(self.reward_names) or 1)
        chosen, metrics = self._choose(step)
        if self._collector is not None:
            metrics.append(Metric("rollout/wait_seconds", Max(self._seconds)))
            metrics += effort_metrics(self._efforts)
            self._efforts = []
        if self._rank == 0:
            metrics += rollout_metrics(came, "rollout")
            metrics += component_metrics(came, self.reward_names, "rollout")
            metrics += staleness_metrics([c.facts for c in chosen], step)
        self._seconds, self._failed = 0.0, 0
        accuracy = sum(f.correct for f in came) / len(came) if came else 0.0
        return StepSamples(chosen, accuracy, metrics + self._books.metrics())

    def ask_ahead(self, step: int) -> None:
        """For what the step after ``step`` needs, which is about to train, where the schedule wants
        that now; with what is known by now, as ``max_new_tokens``. Not collective.
        """
        if self._settings.schedule.ahead and step < self._settings.steps:
            self._ask(step + 1)

    def before_push(self, step: int, stopping: Callable[[], bool] = lambda: False) -> None:
        """``step`` has trained, and its weights are about to go to the servers. ``stopping``: as
        ``take`` has it; what the next step asked for is left undone then, or where no server has
        the weights any more that it was asked of.
        """
        settings = self._settings
        ahead = settings.schedule.ahead and settings.schedule.whole and step < settings.steps
        if ahead and not self._collect(step + 1, stopping, trained=True):
            why = "stopping" if self._servers.serving else "no server has the weights before it"
            log.warning("%s: step %d will sample anew what is not there yet", why, step + 1)

    def finish(self, step: int) -> None:
        """The run is over after ``step``: what is out or left over has expired. Not collective."""
        left = [*self._stock.out, *self._stock.ready]
        self._books.end(step, EXPIRED, left, "left over at the end of the run")
        self._stock.clear()

    # ---- in checkpoints ----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON; not collective, and to be kept of rank 0."""
        return {
            "stock": self._stock.state(self._settings.decisive),
            "step": self._step,
            "rounds": self._rounds,
            "asked": [prompt.id for prompt in self._asked],
            "reward_names": list(self.reward_names),
            "books": self._books.state(),
        }

    def write_ready(self, folder: Path, step: int) -> None:
        """The samples of ``state``."""
        self._stock.write_ready(folder, step, self._collectors, self._host)

    def ready_bytes(self) -> int:
        """Of what ``write_ready`` writes, at most. Not collective."""
        return self._stock.num_bytes

    def load_state(self, state: Mapping[str, Any], folder: Path, step: int) -> None:
        """Goes on from checkpoint ``step``; ``folder``: what ``write_ready`` wrote. Groups that
        were out are sampled anew; for other settings see ``Stock.load``. Raises DataError.
        """
        self._books.load_state(state["books"])
        prompts = {prompt.id: prompt for prompt in self._stream.items}
        about = (prompts, self._settings, self._sampling, self._collectors, self._host)
        left = self._stock.load(state["stock"], folder, step, *about)
        for why, serials in left.expired.items():
            log.warning("%d groups of the checkpoint have expired: %s", len(serials), why)
            self._books.end(step, EXPIRED, serials, why)
        self._hand_out(left.out)
        self._step, self._rounds = int(state["step"]), int(state["rounds"])
        self._asked = [prompts[key] for key in state["asked"]]
        self.reward_names = () if "data.reward" in left.changed else tuple(state["reward_names"])

    def _collect(
        self, step: int, stopping: Callable[[], bool] = lambda: False, *, trained: bool = False
    ) -> bool:
        """Until there is what ``step`` needs; False where that was given up. ``trained``: the
        trainer's weights are no more those that servers have.
        """
        settings, out = self._settings, self._stock.out
        start = told = time.monotonic()
        self._expire(step)
        self._ask(step)
        while True:
            teaching = self._teaching()
            missing = settings.prompts_per_step - len(teaching)
            if missing <= 0 and (settings.first_come or not out):
                break
            short = not out or (settings.first_come and missing > len(out))
            if short and not self._ask_again(step):
                break
            if stopping() or (trained and not self._servers.serving):
                return False
            self._poll(missing, stopping, trained=trained)
            self._expire(step)
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                log.info("step %d: %s", step, self._waiting_for(missing))
        if settings.schedule.whole and out:
            self._recall()
        self._seconds += time.monotonic() - start
        return True

    def _recall(self) -> None:
        """Servers are to be quiet: what is still out goes on later."""
        error: Exception | None = None
        if self._collector is not None:
            try:
                self._collector.recall()
            except Exception as e:
                error = e
        agree(error, self._host, "recalling rollouts")

    def _choose(self, step: int) -> tuple[list[Collected], StepMetrics]:
        """The groups of ``step``, relabelled from 0 on, and out of what is ready."""
        count, ready = self._settings.prompts_per_step, self._stock.ready
        teaching = self._teaching()
        idle = sorted(ready.keys() - teaching)
        chosen = sorted([*teaching[:count], *idle[: max(0, count - len(teaching))]])
        metrics: StepMetrics = []
        if self._settings.max_rounds is not None:
            metrics = filter_metrics(len(teaching), len(ready), self._rounds)
            if len(teaching) < count:
                log.warning(
                    "step %d: %d of %d prompts were informative after %d rounds "
                    "(algo.dynamic_sampling.max_rounds); %d uninformative ones fill the step",
                    *(step, len(teaching), len(ready), self._rounds, count - len(teaching)),
                )
            idle = [serial for serial in idle if serial not in chosen]
            self._books.end(step, FILTERED, idle, "uninformative")
            self._stock.drop(idle)
        samples = [
            replace(c, facts=replace(c.facts, group=label))
            for label, serial in enumerate(chosen)
            for c in ready[serial]
        ]
        facts = pad_rewards([c.facts for c in samples], len(self.reward_names) or 1)
        self._books.end(step, TRAINED, chosen)
        self._stock.drop(chosen)
        self._stock.came.clear()
        return [replace(c, facts=f) for c, f in zip(samples, facts, strict=True)], metrics

    def _teaching(self) -> list[int]:
        """Serials of ready groups that a step may count on, in their order."""
        ready = self._stock.ready
        if self._settings.max_rounds is None:
            return sorted(ready)
        return [
            serial
            for serial in sorted(ready)
            if any(informative([c.facts for c in ready[serial]]).values())
        ]

    def _expire(self, step: int) -> None:
        """Discards what is too old for ``step``."""
        oldest = {
            serial: oldest_version([c.facts for c in group], step - 1)
            for serial, group in self._stock.ready.items()
        }
        bound = step - 1 - self._settings.max_staleness
        old = [serial for serial, version in oldest.items() if version < bound]
        self._books.end(step, EXPIRED, old, "older than rollout.max_staleness")
        self._stock.drop(old)

    # ---- asking ------------------------------------------------------------------------------

    def _ask(self, step: int) -> None:
        """For what ``step`` needs first, if that has not been done."""
        settings = self._settings
        if self._collector is not None:
            self._collector.resume()
        if self._step != step:
            self._step, self._rounds, self._asked = step, 0, []
        if settings.schedule.whole and self._rounds:
            return
        self._rounds = max(self._rounds, 1)
        steps = 1
        if not settings.schedule.whole:  # what is further ahead could only expire
            last = min(self.version + 1 + settings.max_staleness, settings.steps)
            steps = last - step + 1
        wanted = steps * settings.prompts_per_step - len(self._teaching()) - len(self._stock.out)
        self._issue(step, math.ceil(wanted * settings.over_sampling))

    def _ask_again(self, step: int) -> bool:
        """For more, as what there is and comes will not do; False where it has to."""
        settings = self._settings
        if self._rounds < (settings.max_rounds or 1):
            self._rounds += 1
            self._issue(step, math.ceil(settings.prompts_per_step * settings.over_sampling))
            return True
        stock = self._stock
        lost = settings.prompts_per_step - len(stock.ready) - len(stock.out)
        self._issue(step, lost)  # in the place of groups that failed or expired
        return lost > 0 or bool(stock.out)

    def _issue(self, step: int, count: int) -> None:
        """``count`` more prompts, a run of them for each collector."""
        if count <= 0:
            return
        settings, prompts = self._settings, self._stream.take(count)
        samples = settings.samples_per_prompt
        seeds = sample_seeds(settings.seed, step, prompts, samples, self._asked)
        self._asked += prompts
        issued = [
            GroupRequest(self._stock.serial + i, step, prompt, tuple(its), self._sampling)
            for i, (prompt, its) in enumerate(zip(prompts, seeds, strict=True))
        ]
        self._stock.serial += count
        self._books.issue(step, {r.serial: r.prompt.id for r in issued}, samples)
        self._hand_out(issued)

    @property
    def _sampling(self) -> Sampling:
        return Sampling(self._settings.temperature, self.max_new_tokens)

    def _hand_out(self, requests: Sequence[GroupRequest]) -> None:
        """To the collectors, each a run of them."""
        holders = self._stock.holders
        for i, request in enumerate(requests):
            self._stock.out[request.serial] = request
            holders[request.serial] = self._collectors[i * len(self._collectors) // len(requests)]
        mine = [r for r in requests if holders[r.serial] == self._rank]
        if self._collector is not None and mine:
            self._collector.issue(mine)

    # ---- what comes back ---------------------------------------------------------------------

    def _poll(self, missing: int, stopping: Callable[[], bool], *, trained: bool) -> None:
        """What collectors have, or get within a second, on all ranks."""
        outcomes: list[GroupOutcome] = []
        suspects: dict[Member, str] = {}
        error: Exception | None = None
        if self._collector is not None:
            mine = len(self._stock.with_rank(self._rank))
            share = math.ceil(max(missing, 1) / len(self._collectors))
            wanted = min(mine, share) if self._settings.first_come else mine
            try:
                self._collector.wait(wanted, _POLL_S)
                outcomes = self._collector.take()
                suspects = self._collector.suspects()
            except Exception as e:
                error = e
        agree(error, self._host, "collecting rollouts")
        self._servers.refresh(suspects, newcomers=not trained)
        if not (self._servers.serving or trained):
            self._servers.require(stopping)
        self._efforts += [replace(o, samples=()) for o in outcomes]
        samples = [sample for o in outcomes for sample in o.samples]
        self._stock.arrive(share_facts(samples, self._collectors, self._rank, self._host))
        self._learn_names()
        without = [[o.serial, o.failed, o.unscored, o.discarded] for o in outcomes if not o.samples]
        for of_rank in gather_and_share(without, self._host):
            for ended in of_rank:
                self._lose(*ended)

    def _lose(self, serial: int, failed: str, unscored: bool, discarded: bool) -> None:
        request = self._stock.withdraw(serial)
        assert request is not None, serial
        if discarded:
            self._books.end(self._step, EXPIRED, [serial], "stopped half-way (rollout.partial)")
            return
        self._books.end(self._step, FAILED, [serial], failed)
        self._failed += 1
        what = "scored" if unscored else "sampled"
        text = f"prompt {request.prompt.id} (group {serial}) was not {what}: {failed}"
        log.error("%s", text)
        if not (self._settings.tolerant or unscored):
            raise ServerError(f"{text}; on_failure.servers=restart would go on without it")
        if self._failed > self._settings.prompts_per_step:
            raise ServerError(f"{self._failed} groups failed in one step, the last: {text}")

    def _learn_names(self) -> None:
        """A collector in which no response has ended yet learns the names from the others."""
        mine = [] if self._collector is None else list(self._collector.reward_names)
        for rank, found in enumerate(gather_and_share(mine, self._host)):
            names = tuple(found)
            if names and self.reward_names and names != self.reward_names:
                raise DataError(
                    f"rewards of the collector of rank {rank} have the components "
                    f"{', '.join(names)}; accepted: those of the samples before, "
                    f"{', '.join(self.reward_names)}"
                )
            self.reward_names = names or self.reward_names

    def _waiting_for(self, missing: int) -> str:
        by_rank = Counter(self._stock.holders.values())
        held = ", ".join(f"{n} with rank {rank}" for rank, n in sorted(by_rank.items()))
        return f"{missing} groups are missing; out: {held or 'none'}"
