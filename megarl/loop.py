"""The run, top to bottom: build the parts, then step after step until the last.

One step, on every rank:

1. **samples**: from the rollout servers, demonstrations or a recording (``sources.py``); facts of
   them everywhere, tokens where they were collected.
2. **plan**: optimizer steps and rows, of facts alone (``planning.py``); **exchange**: tokens to the
   ranks that use them (``data/exchange.py``), as packed rows; **old and reference log-probs**, and
   a critic's **values**: forward passes; **advantages** and what weighs every token
   (``experience.py``).
3. **train**: the actor's forward and backward passes (``actor/step.py``), then the critic's.
4. **after the update**: new weights to the servers, held-out evaluation (``sources.py``).
5. **report** and, when due, **checkpoint**.

``step`` counts finished training steps; weights version k is the weights after step k. Stopping is
decided by all ranks together, at the same step.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.actor.actor import MegatronActor, build_actor
from megarl.actor.critic import HEAD, MegatronCritic, build_critic
from megarl.actor.setup import Parallel, destroy_parallel, init_parallel
from megarl.actor.state import load_model, load_trained, parameter_bytes, save_trained
from megarl.actor.trained import TrainedModel
from megarl.algos.control import Controllers
from megarl.checkpoint.manager import CRITIC, MEGATRON, CheckpointManager
from megarl.config.load import dump_given, dump_resolved
from megarl.config.schema import Config
from megarl.config.training import optimizer_steps
from megarl.data.exchange import Collected
from megarl.data.nodes import Nodes, find_nodes
from megarl.errors import RunError
from megarl.experience import Ranks, complete_plan, needs_reference
from megarl.hostcomm import agree, any_rank, broadcast_json, gather_and_share, gather_bytes
from megarl.mesh import Mesh
from megarl.models.settings import model_spec
from megarl.monitor.metrics import decode, derived, encode, merge_metrics, reduce_metrics
from megarl.monitor.reporter import Reporter
from megarl.monitor.timing import PhaseTimer
from megarl.operators import agreed_backends, all_calls, check_kernels, describe, write_calls
from megarl.planning import plan_step
from megarl.rundir import RunDir
from megarl.sources import SOURCES, Source, Surroundings
from megarl.stopping import StopRequest
from megarl.types import Job, Max, Metric, StepMetrics, Sum

log = logging.getLogger(__name__)

_TIDY_S = 5.0  # for closing what is open after an error


@dataclass
class Parts:
    """What a run is made of, on this rank."""

    config: Config
    rundir: RunDir
    parallel: Parallel
    actor: MegatronActor
    critic: MegatronCritic | None
    source: Source
    checkpoints: CheckpointManager
    reporter: Reporter
    timer: PhaseTimer
    stop: StopRequest
    controllers: Controllers
    nodes: Nodes
    ops: dict[str, str]  # which implementation of every op runs

    @property
    def trained(self) -> dict[str, TrainedModel]:
        """What a checkpoint holds, by folder."""
        return _trained(self.actor, self.critic)


def run(config: Config, rundir: RunDir, job: Job, stop: StopRequest) -> None:
    """Train to ``run.steps``, or to the step in which a stop was asked for. Collective over all
    trainer ranks.
    """
    with ExitStack() as stack:
        try:
            _steps(*_build(config, rundir, job, stop, stack))
        except BaseException as e:
            # Before anything is tidied up: that may wait for ranks that are gone, and the earliest
            # record is the first cause.
            rundir.record_error(job.rank, stop.where, e)
            stop.fail(stop.exit_code or 1, _TIDY_S)
            raise


def _steps(parts: Parts, step: int) -> None:
    """From ``step`` finished steps to the last."""
    config, stop = parts.config, parts.stop
    saved = step
    metrics = parts.source.start(step)
    if step == 0:  # a resumed run has this step's line already
        _report(parts, step, metrics, [])
    while step < config.run.steps and not any_rank(stop.requested, parts.parallel.host):
        step += 1
        stop.where = f"step {step}"
        train_step(parts, step)
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            save(parts, step)
            saved = step
    if saved != step:
        save(parts, step)
    stop.where = "end"
    _account_for_ops(parts)
    parts.reporter.finish(step)


def _account_for_ops(parts: Parts) -> None:
    """How often each op was called, on all ranks together."""
    calls = all_calls(parts.parallel.host)
    if calls is not None:
        line = write_calls(parts.rundir.ops, parts.ops, calls)
        log.info(line)
        parts.reporter.note(line)


def train_step(parts: Parts, step: int) -> None:
    """The stages of the module docstring."""
    timer, actor, critic, parallel = parts.timer, parts.actor, parts.critic, parts.parallel
    with timer("step"):
        with timer("rollout"):
            samples, metrics = parts.source.take(step)
            facts = [s.facts for s in samples]
        with timer("plan"):
            plan, moved = plan_step(
                samples, parts.config, parallel.mesh, actor.spec, parts.nodes, step
            )
        with timer("old_logprobs"):
            actor.logprobs(plan)
        if critic is not None:
            with timer("values"):
                critic.values(plan)
        with timer("advantages"):
            shared = complete_plan(plan, facts, parts.config, parts.controllers, ranks_of(parallel))
        with timer("train"):
            metrics += actor.train(plan)
        if critic is not None:
            with timer("train_critic"):
                metrics += critic.train(plan)
        with timer("sync"):
            metrics += parts.source.updated(step)
    if parallel.rank == 0:
        metrics += shared
        metrics.append(Metric("perf/tokens", Sum(float(sum(f.length for f in facts)))))
    metrics.append(Metric("perf/exchange_bytes", Max(moved.received + moved.carried)))
    metrics.append(Metric("perf/exchange_seconds", Max(moved.seconds)))
    with timer("eval"):
        metrics += parts.source.evaluate(step)
    _report(parts, step, metrics, samples)


def save(parts: Parts, step: int) -> None:
    """Checkpoint ``step``; everything a later run needs to go on from here."""
    parts.stop.where = f"checkpoint {step}"
    trained = parts.trained
    path = parts.checkpoints.save(
        step,
        loop_state={
            "source": parts.source.state(),
            "controllers": parts.controllers.state(),
        },
        model=parts.actor.spec.as_json(),
        hf_files=parts.config.model.hf,
        write_parts={name: partial(save_trained, model) for name, model in trained.items()},
        num_bytes=sum(map(parameter_bytes, trained.values())) * parts.parallel.mesh.world_size,
    )
    parts.reporter.note(f"checkpoint {path}")


def _build(
    config: Config, rundir: RunDir, job: Job, stop: StopRequest, stack: ExitStack
) -> tuple[Parts, int]:
    """Every part, and the step to go on from."""
    spec = model_spec(config.model)
    stop.where = "joining the other ranks"
    seed, timeout_s = config.run.seed, config.run.timeout_s
    parallel = init_parallel(
        mesh_of(config), local_rank=job.local_rank, seed=seed, timeout_s=timeout_s
    )
    stack.callback(destroy_parallel)
    stop.where = "checking the compiled operators"
    ops = agreed_backends(parallel.device, parallel.host)
    check_kernels(parallel.device, parallel.host)
    log.info(describe(ops, parallel.device))
    resume = _open_run(config, rundir, parallel, stack)
    stop.where = "building the model"
    actor = build_actor(config, spec, parallel, optimizer_steps(config))
    critic = None
    if config.critic.lr is not None:
        critic = build_critic(config, spec, parallel, optimizer_steps(config))
    checkpoints = CheckpointManager(
        rundir.checkpoints, config.checkpoint.keep, parallel.rank, parallel.host
    )
    if config.model.load is not None and (resume is None or needs_reference(config)):
        stop.where = f"loading {config.model.load}"
        _load_weights(_trained(actor, critic), config.model.load / MEGATRON)
    if needs_reference(config):
        actor.keep_reference()
    step = resume or 0
    loop_state: dict[str, Any] | None = None
    if resume is not None:
        stop.where = f"loading checkpoint {resume}"
        folder = rundir.checkpoints / f"step_{resume}"
        loop_state = checkpoints.loop_state(resume)
        for name, model in _trained(actor, critic).items():
            load_trained(model, folder / name)
    reporter = Reporter(
        rundir,
        total_steps=config.run.steps,
        rank=parallel.rank,
        tensorboard=config.monitor.tensorboard,
        resume_step=resume,
    )
    stack.callback(reporter.close)
    reporter.note(describe(ops, parallel.device))
    stop.where = "starting the source of samples"
    nodes = find_nodes(parallel.local_rank, parallel.host, config.run.timeout_s)
    surroundings = Surroundings(config, rundir, job, parallel, nodes, actor, stop)
    source = SOURCES[config.run.mode](surroundings)
    stack.callback(source.close)
    controllers = Controllers.of(config.algo)
    if loop_state is not None:
        source.load_state(loop_state["source"])
        controllers.load_state(loop_state.get("controllers", {}))  # older ones have none
    parts = Parts(
        *(config, rundir, parallel, actor, critic, source, checkpoints, reporter),
        *(PhaseTimer(), stop, controllers, nodes, ops),
    )
    return parts, step


def _trained(actor: MegatronActor, critic: MegatronCritic | None) -> dict[str, TrainedModel]:
    return {MEGATRON: actor} if critic is None else {MEGATRON: actor, CRITIC: critic}


def _load_weights(trained: dict[str, TrainedModel], path: Path) -> None:
    """The policy's weights into every model; a critic keeps its head."""
    for name, model in trained.items():
        load_model(model.model, model.parallel, path, but=HEAD if name == CRITIC else None)
        model.optimizer.reload_model_params()


def ranks_of(parallel: Parallel) -> Ranks:
    return Ranks(
        gather=partial(gather_and_share, group=parallel.host),
        holds=parallel.last_stage,
        speaks=parallel.speaks_for_rows,
    )


def mesh_of(config: Config) -> Mesh:
    p = config.parallel
    return Mesh(
        tp=p.tp,
        pp=p.pp,
        cp=p.cp,
        dp=p.dp,
        ep=p.ep,
        etp=p.etp or p.tp,
        vpp=p.vpp,
        first_layers=p.first_layers,
        last_layers=p.last_layers,
    )


def _open_run(config: Config, rundir: RunDir, parallel: Parallel, stack: ExitStack) -> int | None:
    """Take the run directory; the step to resume from, None for a new run. Same answer on every
    rank.
    """
    error: Exception | None = None
    resume: int | None = None
    if parallel.rank == 0:
        try:
            resume = _claim(config, rundir, stack)
        except Exception as e:
            error = e
    agree(error, parallel.host, "opening the run directory")
    found: int | None = broadcast_json(resume, 0, parallel.host)
    return found


def _claim(config: Config, rundir: RunDir, stack: ExitStack) -> int | None:
    stack.enter_context(rundir.lock())
    resume = None
    if rundir.holds_a_run():
        if not config.run.resume:
            raise RunError(
                f"{rundir.root} already holds a run; set run.resume=true to go on with it, "
                "or another run.dir"
            )
        steps = CheckpointManager.complete_steps(rundir.checkpoints)
        if not steps:
            raise RunError(
                f"run.resume is true, but {rundir.checkpoints} holds no complete checkpoint"
            )
        resume = steps[-1]
    elif config.run.resume:
        raise RunError(f"run.resume is true, but {rundir.root} holds no run")
    rundir.config.write_text(dump_given(config))
    rundir.resolved_config.write_text(dump_resolved(config))
    return resume


def _report(parts: Parts, step: int, metrics: StepMetrics, samples: list[Collected]) -> None:
    """Reduce every metric once over all ranks; rank 0 writes and shows them."""
    local = merge_metrics([metrics, parts.timer.drain()])
    gathered = gather_bytes(encode(local), parts.parallel.host)
    if gathered is None:
        return
    values = reduce_metrics([decode(part) for part in gathered])
    values |= derived(values)
    kept = parts.source.readable(samples, step, parts.config.monitor.samples_per_step)
    parts.reporter.step(step, values, kept)
