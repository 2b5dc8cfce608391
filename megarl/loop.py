"""The run, top to bottom: build the parts, then step after step until the last.

One step, on every rank:

1. **samples**: from the rollout servers, demonstrations or a recording (``sources.py``); the same
   list everywhere.
2. **plan**: advantages, aggregation weights and packed rows (``experience.py``).
3. **old log-probs**, then **train**: the actor's forward and backward passes (``actor/step.py``).
4. **after the update**: new weights to the servers, held-out evaluation (``sources.py``).
5. **report** and, when due, **checkpoint**.

``step`` counts finished training steps; weights version k is the weights after step k. Stopping is
decided by all ranks together, at the same step.
"""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from megarl.actor.actor import MegatronActor, build_actor
from megarl.actor.setup import Parallel, destroy_parallel, init_parallel
from megarl.actor.state import load_actor, load_model, parameter_bytes, save_actor
from megarl.checkpoint.manager import MEGATRON, CheckpointManager
from megarl.config.load import dump_given, dump_resolved
from megarl.config.schema import Config
from megarl.config.validate import optimizer_steps
from megarl.errors import RunError
from megarl.experience import advantages_of, make_plan
from megarl.hostcomm import agree, any_rank, broadcast_json, gather_bytes
from megarl.mesh import Mesh
from megarl.models.spec import read_spec
from megarl.monitor.metrics import decode, encode, merge_metrics, reduce_metrics
from megarl.monitor.reporter import Reporter
from megarl.monitor.timing import PhaseTimer
from megarl.rundir import RunDir
from megarl.sources import SOURCES, Source, Surroundings
from megarl.stopping import StopRequest
from megarl.types import Job, Metric, Sample, StepMetrics, Sum

log = logging.getLogger(__name__)

_TIDY_S = 5.0  # for closing what is open after an error


@dataclass
class Parts:
    """What a run is made of, on this rank."""

    config: Config
    rundir: RunDir
    parallel: Parallel
    actor: MegatronActor
    source: Source
    checkpoints: CheckpointManager
    reporter: Reporter
    timer: PhaseTimer
    stop: StopRequest


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
    parts.reporter.finish(step)


def train_step(parts: Parts, step: int) -> None:
    """The five stages of the module docstring."""
    timer, actor, parallel = parts.timer, parts.actor, parts.parallel
    with timer("step"):
        with timer("rollout"):
            samples, metrics = parts.source.take(step)
        with timer("plan"):
            advantages, advantage_metrics = advantages_of(samples, parts.config)
            plan = make_plan(samples, advantages, parts.config, parallel.mesh, parallel.at.dp)
        with timer("old_logprobs"):
            metrics += actor.logprobs(plan)
        with timer("train"):
            metrics += actor.train(plan)
        with timer("sync"):
            metrics += parts.source.updated(step)
    if parallel.rank == 0:
        metrics += advantage_metrics
        metrics.append(Metric("perf/tokens", Sum(float(sum(len(s.tokens) for s in samples)))))
    with timer("eval"):
        metrics += parts.source.evaluate(step)
    _report(parts, step, metrics, samples)


def save(parts: Parts, step: int) -> None:
    """Checkpoint ``step``; everything a later run needs to go on from here."""
    parts.stop.where = f"checkpoint {step}"
    actor = parts.actor
    path = parts.checkpoints.save(
        step,
        loop_state={"source": parts.source.state()},
        model=actor.spec.as_json(),
        hf_files=parts.config.model.hf,
        write_parts=lambda folder: save_actor(actor, folder),
        num_bytes=parameter_bytes(actor) * parts.parallel.mesh.world_size,
    )
    parts.reporter.note(f"checkpoint {path}")


def _build(
    config: Config, rundir: RunDir, job: Job, stop: StopRequest, stack: ExitStack
) -> tuple[Parts, int]:
    """Every part, and the step to go on from."""
    mesh = mesh_of(config)
    spec = read_spec(config.model.hf)
    stop.where = "joining the other ranks"
    parallel = init_parallel(
        mesh, local_rank=job.local_rank, seed=config.run.seed, timeout_s=config.run.timeout_s
    )
    stack.callback(destroy_parallel)
    resume = _open_run(config, rundir, parallel, stack)
    stop.where = "building the model"
    actor = build_actor(config, spec, parallel, optimizer_steps(config))
    checkpoints = CheckpointManager(
        rundir.checkpoints, config.checkpoint.keep, parallel.rank, parallel.host
    )
    step = 0
    loop_state: dict[str, Any] | None = None
    if resume is not None:
        stop.where = f"loading checkpoint {resume}"
        folder = rundir.checkpoints / f"step_{resume}"
        loop_state = checkpoints.loop_state(resume)
        load_actor(actor, folder / MEGATRON)
        step = resume
    elif config.model.load is not None:
        stop.where = f"loading {config.model.load}"
        load_model(actor.model, parallel, config.model.load / MEGATRON)
        actor.optimizer.reload_model_params()
    reporter = Reporter(
        rundir,
        total_steps=config.run.steps,
        rank=parallel.rank,
        tensorboard=config.monitor.tensorboard,
        resume_step=resume,
    )
    stack.callback(reporter.close)
    stop.where = "starting the source of samples"
    surroundings = Surroundings(config, rundir, job, parallel, actor, stop)
    source = SOURCES[config.run.mode](surroundings)
    stack.callback(source.close)
    if loop_state is not None:
        source.load_state(loop_state["source"])
    timer = PhaseTimer()
    return Parts(config, rundir, parallel, actor, source, checkpoints, reporter, timer, stop), step


def mesh_of(config: Config) -> Mesh:
    p = config.parallel
    return Mesh(tp=p.tp, pp=p.pp, cp=p.cp, dp=p.dp, ep=p.ep, etp=p.etp or p.tp, vpp=p.vpp)


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


def _report(parts: Parts, step: int, metrics: StepMetrics, samples: list[Sample]) -> None:
    """Reduce every metric once over all ranks; rank 0 writes and shows them."""
    local = merge_metrics([metrics, parts.timer.drain()])
    gathered = gather_bytes(encode(local), parts.parallel.host)
    if gathered is None:
        return
    values = reduce_metrics([decode(part) for part in gathered])
    if "perf/tokens" in values and values.get("time/step"):
        values["perf/tokens_per_s"] = values["perf/tokens"] / values["time/step"]
    kept = parts.source.readable(samples, step, parts.config.monitor.samples_per_step)
    parts.reporter.step(step, values, kept)
