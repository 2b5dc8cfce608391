"""Where a step's samples come from, and what follows an update: one class a ``run.mode``.

Every rank gets the same samples in the same order, as far as facts go; their tokens may be on one
rank only. Methods are collective over all trainer ranks unless said.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from megarl.actor.actor import MegatronActor
from megarl.actor.setup import Parallel
from megarl.config.schema import Config
from megarl.curriculum import LengthCurriculum
from megarl.data.exchange import Collected, everywhere
from megarl.data.nodes import Nodes
from megarl.data.prompts import (
    DemonstrationStream,
    PromptStream,
    load_demonstrations,
    load_prompts,
)
from megarl.data.recorded import (
    checked_routing,
    read_samples,
    recorded_path,
    recorded_steps,
    write_samples,
)
from megarl.data.rewards import load_reward
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import DataError, ServerError
from megarl.evaluation import Evaluations
from megarl.hostcomm import agree, broadcast_json
from megarl.monitor.samples import SampleText
from megarl.rollout.addresses import address_towards, server_address
from megarl.rollout.collect import CollectSettings, RolloutCollector
from megarl.rollout.control import ServerControl
from megarl.rollout.fleet import Fleet, ServerDeath, start_fleet
from megarl.rollout.process import read_key
from megarl.rounds import Rounds, only_informative
from megarl.rundir import RunDir
from megarl.stopping import StopRequest
from megarl.sync.broadcast import BroadcastTransport
from megarl.types import Job, Max, Metric, Prompt, RoutingShape, Sample, StepMetrics

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


class Source(Protocol):
    def start(self, step: int) -> StepMetrics:
        """Before the first step of this process; ``step`` steps are done."""
        ...

    def take(self, step: int) -> tuple[list[Collected], StepMetrics]:
        """The samples that step ``step`` trains on."""
        ...

    def updated(self, step: int) -> StepMetrics:
        """The actor's weights are now those after ``step``."""
        ...

    def evaluate(self, step: int) -> StepMetrics: ...

    def readable(self, samples: Sequence[Collected], step: int, count: int) -> list[SampleText]:
        """The first ``count`` of the samples that are here as text, for people. Not collective."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class _Passive:
    """What demonstrations and recordings have in common: nothing follows an update."""

    def start(self, step: int) -> StepMetrics:
        return []

    def updated(self, step: int) -> StepMetrics:
        return []

    def evaluate(self, step: int) -> StepMetrics:
        return []

    def readable(self, samples: Sequence[Collected], step: int, count: int) -> list[SampleText]:
        return []

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

    def load_state(self, state: dict[str, Any]) -> None:
        self.stream.load_state(state)


class RecordedSource(_Passive):
    """``train_only``: the rollouts an earlier run recorded, step by step."""

    def __init__(self, run: Surroundings) -> None:
        config = run.config
        assert config.data.recorded is not None, "checked by validate()"
        self.filtered = config.algo.dynamic_sampling is not None
        self.routing = _replayed(run)
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

    def load_state(self, state: dict[str, Any]) -> None:
        return


class RolloutSource:
    """``rl``: prompts to the rollout servers, answers back, new weights over after every update."""

    def __init__(self, run: Surroundings) -> None:
        config, parallel, actor = run.config, run.parallel, run.actor
        self.config, self.rundir, self.job = config, run.rundir, run.job
        self.parallel, self.actor = parallel, actor
        self.tokenizer = load_tokenizer(config.model.hf, actor.spec.eos_ids)
        assert config.data.prompts is not None, "checked by validate()"
        self.stream = PromptStream(self._prompts(config.data.prompts), config.run.seed)
        self.evaluations = Evaluations(config, parallel.rank, parallel.host, self._prompts)
        self.answers = {p.id: str(p.payload.get("answer", "")) for p in self.stream.items}
        self.collectors = run.nodes.leaders
        self.routing = _replayed(run)
        self.fleet = self._open_fleet(run.stop)
        urls: list[str] = broadcast_json(self.fleet.urls if self.fleet else None, 0, parallel.host)
        key = read_key(config.rollout.key_file or run.rundir.key)
        self.collector = None
        if parallel.rank in self.collectors:
            self.collector = RolloutCollector(
                urls,
                key,
                _collect_settings(config, self.routing),
                decode=self.tokenizer.decode,
                reward=load_reward(config.data.reward),
            )
        sampling = config.algo.dynamic_sampling
        self.rounds = Rounds(
            self.stream,
            self.collector,
            self.collectors,
            parallel.host,
            prompts_per_step=config.data.prompts_per_step,
            max_rounds=sampling.max_rounds if sampling else None,
        )
        self.lengths = LengthCurriculum(config.rollout.stages)
        self.transport = self._connect(urls, key)

    def start(self, step: int) -> StepMetrics:
        metrics = self._push(step)
        if self.routing is not None:
            self._probe_routing()
        return metrics + self.evaluate(step) if step == 0 else metrics

    def take(self, step: int) -> tuple[list[Collected], StepMetrics]:
        limit = self.lengths.max_new_tokens
        taken = self.rounds.take(step, limit)
        self.lengths.update(step, taken.accuracy)
        if (longer := self.lengths.max_new_tokens) != limit:
            log.info("after step %d responses may have %d tokens", step, longer)
        if self.config.monitor.record_rollouts:
            self._record(taken.samples, step)
        return taken.samples, [*taken.metrics, Metric("rollout/max_new_tokens", Max(limit))]

    def updated(self, step: int) -> StepMetrics:
        return self._push(step)

    def evaluate(self, step: int) -> StepMetrics:
        """What ``Evaluations`` of it are due."""
        return self.evaluations.run(self.collector, step)

    def readable(self, samples: Sequence[Collected], step: int, count: int) -> list[SampleText]:
        return [
            SampleText.of(s, step, self.tokenizer.decode, self.answers.get(s.prompt_id, ""))
            for s in _here(samples)[:count]
        ]

    def state(self) -> dict[str, Any]:
        state = {**self.stream.state(), "reward_names": list(self.rounds.reward_names)}
        if self.config.rollout.length_stages:
            state["lengths"] = self.lengths.state()
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        self.stream.load_state(state)
        self.rounds.reward_names = tuple(state.get("reward_names", ()))  # older ones have none
        if self.config.rollout.length_stages and "lengths" in state:
            self.lengths.load_state(state["lengths"])

    def close(self) -> None:
        """Ends what this rank started. Not collective: after a failure nobody may be left to wait
        for.
        """
        self.transport.close()
        if self.collector is not None:
            self.collector.close()
        if self.fleet is not None:
            self.fleet.close()

    def _prompts(self, path: Path) -> list[Prompt]:
        rollout, ev = self.config.rollout, self.config.eval
        longest = max(rollout.longest_response, ev.max_new_tokens if ev.every else 0)
        return load_prompts(path, self.tokenizer, rollout.context_length - longest)

    def _open_fleet(self, stop: StopRequest) -> Fleet | None:
        """Servers are started by rank 0, on its node, and end with it."""
        fleet, error = None, None
        if self.parallel.rank == 0:
            try:
                fleet = start_fleet(
                    self.config.rollout,
                    run_dir=self.rundir,
                    model=self.config.model.hf,
                    dtype=self.config.precision.dtype,
                    on_death=partial(self._died, stop),
                    host=server_address(self.job),
                    routing=self.routing is not None,
                )
                stop.on_end(fleet.close)
            except Exception as e:
                error = e
        agree(error, self.parallel.host, "starting the rollout server")
        return fleet

    def _probe_routing(self) -> None:
        """A server that does not say what experts it chose is found before the first step."""
        error: Exception | None = None
        if self.collector is not None:
            try:
                self.collector.probe_routing(self.stream.items[0].token_ids)
            except Exception as e:
                error = e
        agree(error, self.parallel.host, "asking the rollout servers for routed experts")

    def _died(self, stop: StopRequest, death: ServerDeath) -> None:
        """Called from the fleet's watcher: nothing more can be sampled, and a collective may be
        waiting.
        """
        self.rundir.record_error(self.parallel.rank, stop.where, ServerError(str(death)))
        stop.fail(1, delay_s=3.0)

    def _connect(self, urls: Sequence[str], key: str) -> BroadcastTransport:
        mesh, at = self.parallel.mesh, self.parallel.at
        sync = self.config.sync
        transport = BroadcastTransport(
            rank=self.parallel.rank,
            stage=at.pp,
            senders=[mesh.sender(stage) for stage in range(mesh.pp)],
            host=self.parallel.host,
            address=address_towards(urls[0]),
            backend=_backend(self.config),
            max_bytes=int(sync.bucket_mb * 2**20),
            timeout_s=sync.timeout_s,
        )
        ranks = self.config.rollout.server_tp
        sinks = [ServerControl(url, key, ranks=ranks) for url in urls] if transport.sending else []
        transport.connect(self.actor.weights(), sinks)
        return transport

    def _push(self, version: int) -> StepMetrics:
        receipt = self.transport.push(version)
        if receipt is None:
            return []
        return [
            Metric("sync/version", Max(receipt.version)),
            Metric("sync/seconds", Max(receipt.seconds)),
            Metric("sync/bytes", Max(receipt.num_bytes)),
            Metric("sync/tensors", Max(receipt.tensors)),
        ]

    def _record(self, samples: Sequence[Collected], step: int) -> None:
        """Every collector writes what it holds."""
        error: Exception | None = None
        if self.parallel.rank in self.collectors:
            part = self.collectors.index(self.parallel.rank)
            path = recorded_path(self.rundir.rollouts, step, part, len(self.collectors))
            try:
                write_samples(path, _here(samples))
            except OSError as e:
                error = e
        agree(error, self.parallel.host, "recording rollouts")


SOURCES: dict[str, Callable[[Surroundings], Source]] = {
    "rl": RolloutSource,
    "sft": DemonstrationSource,
    "train_only": RecordedSource,
}


def _here(samples: Sequence[Collected]) -> list[Sample]:
    """Those that this rank holds, with what was made of them since they were collected."""
    return [
        replace(c.sample, group=c.facts.group, rewards=c.facts.rewards)
        for c in samples
        if c.sample is not None
    ]


def _replayed(run: Surroundings) -> RoutingShape | None:
    """What samples must bring of their routing, where the policy takes the rollout's."""
    spec = run.actor.spec
    if run.config.moe.routing_replay != "rollout":
        return None
    return RoutingShape(spec.moe_layers, spec.topk, spec.experts)


def _collect_settings(config: Config, routing: RoutingShape | None) -> CollectSettings:
    return CollectSettings(
        samples_per_prompt=config.data.samples_per_prompt,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        request_timeout_s=config.rollout.request_timeout_s,
        routing=routing,
    )


def _backend(config: Config) -> str:
    """NCCL needs a device per member; a server that we start shares its device with rank 0."""
    if config.sync.backend != "auto":
        return config.sync.backend
    return "nccl" if torch.cuda.is_available() and config.rollout.urls else "gloo"
