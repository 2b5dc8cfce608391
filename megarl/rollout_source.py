"""``run.mode: rl``: prompts to the rollout servers, answers back, new weights over after every
update.
"""

import logging
import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megarl.books import Books
from megarl.collection import Collection
from megarl.config.failures import on_failure
from megarl.config.rollout import staleness_bound
from megarl.config.schema import Config
from megarl.config.served import served_dtype
from megarl.curriculum import LengthCurriculum
from megarl.data.exchange import Collected
from megarl.data.prompts import PromptStream, load_prompts
from megarl.data.recorded import recorded_path, write_samples
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import ConfigError, ServerError
from megarl.evaluation import Evaluations
from megarl.hostcomm import agree, any_rank
from megarl.monitor.samples import SampleText
from megarl.rollout.addresses import server_address
from megarl.rollout.collector import Collector, CollectorSettings
from megarl.rollout.collector_restart import RestartingCollector
from megarl.rollout.control import ServerControl
from megarl.rollout.fleet import Fleet, ServerDeath, start_fleet
from megarl.rollout.process import read_key, read_or_make_key
from megarl.schedule import SCHEDULES, CollectionSettings, decisive_settings
from megarl.servers import Servers
from megarl.sources import Surroundings, held_here, replayed
from megarl.transports import build_transport
from megarl.types import Max, Member, Metric, Prompt, StepMetrics

log = logging.getLogger(__name__)


class RolloutSource:
    """Its collectors are the leaders of nodes; its servers are kept by rank 0."""

    leaves_samples = True

    def __init__(self, run: Surroundings) -> None:
        config, parallel = run.config, run.parallel
        self.run, self.config, self.parallel = run, config, parallel
        self.collectors = run.nodes.leaders
        self.routing = replayed(run)
        self.key_file = self._key_file()
        self.collector = self._start_collector()
        self.tokenizer = load_tokenizer(config.model.hf, run.actor.spec.eos_ids)
        self.stream = PromptStream(self._training_prompts(), config.run.seed)
        self.evaluations = Evaluations(config, parallel.rank, parallel.host, self._prompts)
        self.answers = {p.id: str(p.payload.get("answer", "")) for p in self.stream.items}
        self.fleet = self._start_fleet()
        self.transport = build_transport(config, run.rundir, parallel, run.actor)
        self.servers = Servers(
            self.transport,
            parallel.host,
            sink=self._sink,
            fleet=self.fleet,
            collector=self.collector,
            start_timeout_s=config.rollout.start_timeout_s,
            control_timeout_s=config.sync.timeout_s,
            routed=bool(config.rollout.router_command),
            router=self.fleet.router if self.fleet is not None else None,
        )
        self.collection = Collection(
            self.stream,
            self.collector,
            self.collectors,
            parallel.host,
            self.servers,
            Books(run.rundir.books if parallel.rank == 0 else None),
            collection_settings(config),
        )
        self.lengths = LengthCurriculum(config.rollout.stages)

    def start(self, step: int) -> StepMetrics:
        self.servers.require(self._stopping)
        metrics = self.servers.push(step)
        if self.routing is not None:
            self._probe_routing()
        return metrics + self.evaluate(step) if step == 0 else metrics

    def take(self, step: int) -> tuple[list[Collected], StepMetrics] | None:
        limit = self.lengths.max_new_tokens
        self.collection.max_new_tokens = limit
        taken = self.collection.take(step, self._stopping)
        if taken is None:
            return None
        self.lengths.update(step, taken.accuracy)
        if (longer := self.lengths.max_new_tokens) != limit:
            log.info("after step %d responses may have %d tokens", step, longer)
        self.collection.max_new_tokens = longer
        self.collection.ask_ahead(step)
        if self.config.rollout.release_memory:
            self.servers.release()
        if self.config.monitor.record_rollouts:
            self._record(taken.samples, step)
        return taken.samples, [*taken.metrics, Metric("rollout/max_new_tokens", Max(limit))]

    def updated(self, step: int) -> StepMetrics:
        self.collection.before_push(step, self._stopping)
        events = self.fleet.events if self.fleet is not None else {}
        return self.servers.push(step) + [
            Metric(f"servers/{event}", Max(count)) for event, count in events.items()
        ]

    def evaluate(self, step: int) -> StepMetrics:
        """What ``Evaluations`` of it are due."""
        stop = self.run.stop
        return self.evaluations.run(self.collector, self.servers, step, lambda: stop.requested)

    def readable(self, samples: Sequence[Collected], step: int, count: int) -> list[SampleText]:
        return [
            SampleText.of(s, step, self.tokenizer.decode, self.answers.get(s.prompt_id, ""))
            for s in held_here(samples)[:count]
        ]

    def state(self) -> dict[str, Any]:
        state = {**self.stream.state(), "collection": self.collection.state()}
        if self.config.rollout.length_stages:
            state["lengths"] = self.lengths.state()
        return state

    @property
    def num_bytes(self) -> int:
        return self.collection.ready_bytes()

    def write(self, folder: Path, step: int) -> None:
        self.collection.write_ready(folder, step)

    def load_state(self, state: dict[str, Any], folder: Path, step: int) -> None:
        self.stream.load_state(state)
        if self.config.rollout.length_stages and "lengths" in state:
            self.lengths.load_state(state["lengths"])
        self.collection.max_new_tokens = self.lengths.max_new_tokens
        if "collection" in state:  # older ones have none
            self.collection.load_state(state["collection"], folder, step)

    def finish(self, step: int) -> None:
        self.collection.finish(step)

    def close(self) -> None:
        self.transport.close()
        if self.collector is not None:
            self.collector.close()
        if self.fleet is not None:
            self.fleet.close()

    def _stopping(self) -> bool:
        """Collective."""
        return any_rank(self.run.stop.requested, self.parallel.host)

    def _training_prompts(self) -> list[Prompt]:
        prompts = self.config.data.prompts
        assert prompts is not None, "checked by validate()"
        return self._prompts(prompts, self.config.rollout.longest_response)

    def _prompts(self, path: Path, longest: int) -> list[Prompt]:
        """``longest``: tokens of a response, which have to fit behind each of them."""
        room = self.config.rollout.context_length - longest
        return load_prompts(path, self.tokenizer, room)

    def _key_file(self) -> Path:
        """There before anybody is started who reads it."""
        if self.config.rollout.key_file is not None:
            return self.config.rollout.key_file
        path, error = self.run.rundir.key, None
        if self.parallel.rank == 0:
            try:
                read_or_make_key(path)
            except (OSError, ConfigError) as e:
                error = e
        agree(error, self.parallel.host, "making the servers' key")
        return path

    def _start_collector(self) -> RestartingCollector | None:
        """At once: its process imports while the rest is built."""
        rank, config = self.parallel.rank, self.config
        if rank not in self.collectors:
            return None
        rollout, rundir = config.rollout, self.run.rundir
        settings = CollectorSettings(
            hf=config.model.hf,
            eos_ids=self.run.actor.spec.eos_ids,
            reward=config.data.reward,
            reward_timeout_s=config.data.reward_timeout_s,
            key_file=self.key_file,
            log_file=rundir.logs / f"collector_{rank}.log",
            partial=rollout.partial,
            mask_continued=rollout.mask_continued,
            max_attempts=rollout.max_attempts,
            max_in_flight=rollout.max_in_flight,
            request_timeout_s=rollout.request_timeout_s,
            routing=self.routing,
            seed=config.run.seed,
        )
        restarts = on_failure(config.on_failure, "collectors", os.environ) == "restart"
        return RestartingCollector(
            partial(Collector, settings), config.on_failure.max_restarts if restarts else 0
        )

    def _start_fleet(self) -> Fleet | None:
        """Servers are started by rank 0, on its node, and end with it."""
        fleet, error = None, None
        if self.parallel.rank == 0:
            failures = self.config.on_failure
            try:
                fleet = start_fleet(
                    self.config.rollout,
                    run_dir=self.run.rundir,
                    model=self.config.server_hf,
                    dtype=served_dtype(self.config),
                    on_death=self._died,
                    host=server_address(self.run.job),
                    routing=self.routing is not None,
                    on_failure=on_failure(failures, "servers", os.environ),
                    max_restarts=failures.max_restarts,
                    progress=self.run.note,
                )
                self.run.stop.on_end(fleet.close)
            except Exception as e:
                error = e
        agree(error, self.parallel.host, "starting the rollout servers")
        return fleet

    @cached_property
    def _key(self) -> str:
        """Read once: every rank names every server in every push."""
        return read_key(self.key_file)

    def _sink(self, member: Member) -> ServerControl:
        return ServerControl(
            member.url,
            self._key,
            member.name,
            ranks=member.ranks,
            boot=member.boot,
            version=member.version,
            released=(member.name, member.boot) in self.servers.released,
        )

    def _probe_routing(self) -> None:
        """A server that does not say what experts it chose is found before the first step."""
        error: Exception | None = None
        if self.collector is not None:
            try:
                self.collector.probe_routing(self.stream.items[0].token_ids)
            except Exception as e:
                error = e
        agree(error, self.parallel.host, "asking the rollout servers for routed experts")

    def _died(self, death: ServerDeath) -> None:
        """Called from the fleet's watcher: nothing more can be sampled, and a collective may be
        waiting.
        """
        stop = self.run.stop
        self.run.rundir.record_error(self.parallel.rank, stop.where, ServerError(str(death)))
        stop.fail(1, delay_s=3.0)

    def _record(self, samples: Sequence[Collected], step: int) -> None:
        """Every collector writes what it holds."""
        error: Exception | None = None
        if self.parallel.rank in self.collectors:
            part = self.collectors.index(self.parallel.rank)
            path = recorded_path(self.run.rundir.rollouts, step, part, len(self.collectors))
            try:
                write_samples(path, held_here(samples))
            except OSError as e:
                error = e
        agree(error, self.parallel.host, "recording rollouts")


def collection_settings(config: Config) -> CollectionSettings:
    rollout, data, sampling = config.rollout, config.data, config.algo.dynamic_sampling
    return CollectionSettings(
        prompts_per_step=data.prompts_per_step,
        samples_per_prompt=data.samples_per_prompt,
        steps=config.run.steps,
        temperature=rollout.temperature,
        seed=config.run.seed,
        schedule=SCHEDULES[rollout.schedule],
        max_staleness=staleness_bound(rollout),
        over_sampling=rollout.over_sampling,
        max_rounds=sampling.max_rounds if sampling else None,
        tolerant=on_failure(config.on_failure, "servers", os.environ) == "restart",
        decisive=decisive_settings(config),
    )
