"""Where a step's samples come from, and what follows an update: one class a ``run.mode``.

Every rank gets the same samples in the same order, as far as facts go; their tokens may be on one
rank only. Methods are collective over all trainer ranks unless said.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megarl.actor.actor import MegatronActor
from megarl.actor.setup import Parallel
from megarl.config.schema import Config
from megarl.data.exchange import Collected, everywhere
from megarl.data.nodes import Nodes
from megarl.data.prompts import (
    DemonstrationStream,
    load_demonstrations,
)
from megarl.data.recorded import (
    checked_routing,
    read_samples,
    recorded_steps,
)
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import DataError
from megarl.informative import only_informative
from megarl.monitor.samples import SampleText
from megarl.rundir import RunDir
from megarl.stopping import StopRequest
from megarl.types import Job, RoutingShape, Sample, StepMetrics

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Surroundings:
    """What a source may use of the run."""

    config: Config
    rundir: RunDir
    job: Job
    parallel: Parallel
    nodes: Nodes
    actor: MegatronActor
    stop: StopRequest
    note: Callable[[str], None]  # a line above the progress, on rank 0


class Source(Protocol):
    leaves_samples: bool  # in checkpoints: ``write`` writes some

    @property
    def num_bytes(self) -> int:
        """That ``write`` writes on all ranks together, at most; the same on every rank."""
        ...

    def start(self, step: int) -> StepMetrics:
        """Before the first step of this process; ``step`` steps are done."""
        ...

    def take(self, step: int) -> tuple[list[Collected], StepMetrics] | None:
        """The samples that step ``step`` trains on; None where the run is to end before there are
        any, the same on every rank.
        """
        ...

    def updated(self, step: int) -> StepMetrics:
        """The actor's weights are now those after ``step``."""
        ...

    def evaluate(self, step: int) -> StepMetrics: ...

    def readable(self, samples: Sequence[Collected], step: int, count: int) -> list[SampleText]:
        """The first ``count`` of the samples that are here as text, for people. Not collective."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON, of rank 0. Not collective."""
        ...

    def write(self, folder: Path, step: int) -> None:
        """What of the state after ``step`` is no JSON."""
        ...

    def load_state(self, state: dict[str, Any], folder: Path, step: int) -> None:
        """Goes on after ``step``. ``folder``: of ``write``."""
        ...

    def finish(self, step: int) -> None:
        """The run is complete."""
        ...

    def close(self) -> None:
        """Not collective: after a failure nobody may be left to wait for."""
        ...


class _Passive:
    """What demonstrations and recordings have in common: nothing follows an update."""

    leaves_samples = False
    num_bytes = 0

    def start(self, step: int) -> StepMetrics:
        return []

    def updated(self, step: int) -> StepMetrics:
        return []

    def evaluate(self, step: int) -> StepMetrics:
        return []

    def readable(self, samples: Sequence[Collected], step: int, count: int) -> list[SampleText]:
        return []

    def write(self, folder: Path, step: int) -> None:
        return

    def finish(self, step: int) -> None:
        return

    def close(self) -> None:
        return


class DemonstrationSource(_Passive):
    """``sft``: demonstrations in shuffled epochs; every rank reads the file."""

    def __init__(self, run: Surroundings) -> None:
        config = run.config
        assert config.data.demonstrations is not None, "checked by validate()"
        tokenizer = load_tokenizer(config.model.hf, run.actor.spec.eos_ids)
        samples = load_demonstrations(
            config.data.demonstrations, tokenizer, config.train.row_tokens
        )
        self.stream = DemonstrationStream(samples, config.run.seed)
        self.count = config.data.prompts_per_step

    def take(self, step: int) -> tuple[list[Collected], StepMetrics]:
        return everywhere(self.stream.take(self.count)), []

    def state(self) -> dict[str, Any]:
        return self.stream.state()

    def load_state(self, state: dict[str, Any], folder: Path, step: int) -> None:
        self.stream.load_state(state)


class RecordedSource(_Passive):
    """``train_only``: the rollouts an earlier run recorded, step by step."""

    def __init__(self, run: Surroundings) -> None:
        config = run.config
        assert config.data.recorded is not None, "checked by validate()"
        self.filtered = config.algo.dynamic_sampling is not None
        self.routing = replayed(run)
        self.paths = dict(recorded_steps(config.data.recorded))
        missing = [s for s in range(1, config.run.steps + 1) if s not in self.paths]
        if missing:
            raise DataError(
                f"data.recorded={config.data.recorded} has no rollouts of step {missing[0]}; "
                f"run.steps={config.run.steps} needs 1 to {config.run.steps}"
            )

    def take(self, step: int) -> tuple[list[Collected], StepMetrics]:
        samples = read_samples(self.paths[step])
        if self.routing is not None:
            samples = checked_routing(samples, self.routing, self.paths[step])
        metrics: StepMetrics = []
        if self.filtered:
            samples, metrics = only_informative(samples, step)
        return everywhere(samples), metrics

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any], folder: Path, step: int) -> None:
        return


def replayed(run: Surroundings) -> RoutingShape | None:
    """What samples must bring of their routing, where the policy takes the rollout's."""
    spec = run.actor.spec
    if run.config.moe.routing_replay != "rollout":
        return None
    return RoutingShape(spec.moe_layers, spec.topk, spec.experts)


def held_here(samples: Sequence[Collected]) -> list[Sample]:
    """Those that this rank holds, with what was made of them since they were collected."""
    return [
        replace(c.sample, group=c.facts.group, rewards=c.facts.rewards)
        for c in samples
        if c.sample is not None
    ]
