"""What a run is made of, on one rank: built from its configuration, in the order of dependence, and
brought to the step that it goes on from.
"""

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megarl.actor.actor import MegatronActor, build_actor
from megarl.actor.critic import MegatronCritic, build_critic, load_start
from megarl.actor.fp8_active import Report, require_fp8
from megarl.actor.fp8_active import describe as describe_fp8
from megarl.actor.setup import Parallel, destroy_parallel, init_beside, init_parallel
from megarl.actor.state import load_model, load_trained
from megarl.actor.trained import TrainedModel
from megarl.algos.control import Controllers
from megarl.checkpoint.manager import (
    CRITIC,
    CRITIC_MODEL,
    MEGATRON,
    MODEL,
    REFERENCE,
    SAMPLES,
    CheckpointManager,
)
from megarl.checkpoint.models import (
    NOT_OF_THE_BODY,
    config_contradictions,
    require_no_contradictions,
)
from megarl.config.fp8 import row_alignment
from megarl.config.load import dump_given, dump_resolved
from megarl.config.schema import Config, ParallelSection
from megarl.config.training import critic_optimizer_steps, optimizer_steps
from megarl.data.nodes import Nodes, find_nodes
from megarl.errors import ConfigError, DataError, Problem
from megarl.experience import Ranks, moving_reference, needs_reference
from megarl.hostcomm import agree, broadcast_json, gather_and_share
from megarl.mesh import Mesh
from megarl.models.settings import model_spec
from megarl.models.spec import ModelSpec, read_spec
from megarl.monitor.reporter import Reporter
from megarl.monitor.timing import PhaseTimer
from megarl.operators import agreed_backends, check_kernels, describe
from megarl.rollout_source import RolloutSource
from megarl.rundir import RunDir
from megarl.sources import DemonstrationSource, RecordedSource, Source, Surroundings
from megarl.stopping import StopRequest
from megarl.types import Job

log = logging.getLogger(__name__)


SOURCES: dict[str, Callable[[Surroundings], Source]] = {  # by run.mode
    "rl": RolloutSource,
    "sft": DemonstrationSource,
    "train_only": RecordedSource,
}


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
    saves_reference: bool  # it is or may become another than the model the run started from

    @property
    def trained(self) -> dict[str, TrainedModel]:
        """What a checkpoint holds, by folder."""
        return _trained(self.actor, self.critic)


def build(
    config: Config, rundir: RunDir, job: Job, stop: StopRequest, stack: ExitStack
) -> tuple[Parts, int]:
    """Every part, and the step to go on from."""
    spec = model_spec(config.model)
    stop.where = "joining the other ranks"
    seed, timeout_s = config.run.seed, config.run.timeout_s
    align = row_alignment(config.precision.fp8)
    parallel = init_parallel(
        mesh_of(config.parallel, align), local_rank=job.local_rank, seed=seed, timeout_s=timeout_s
    )
    stack.callback(destroy_parallel)
    stop.where = "checking the compiled operators"
    ops = agreed_backends(parallel.device, parallel.host)
    check_kernels(parallel.device, parallel.host)
    log.info(describe(ops, parallel.device))
    resume = _open_run(config, rundir, parallel, stack)
    folder = rundir.checkpoints / f"step_{resume}"
    stop.where = "comparing checkpoints with config.json"
    critic_spec = None
    if config.critic.lr is not None:
        critic_spec = read_spec(config.critic_hf, for_values=True)
    own = None if resume is None else folder
    _require_same_models(config, spec, critic_spec, own, parallel)
    stop.where = "building the model"
    actor = build_actor(config, spec, parallel, optimizer_steps(config))
    critic = None if critic_spec is None else _build_critic(config, critic_spec, parallel)
    models = {name: trained.model for name, trained in _trained(actor, critic).items()}
    fp8 = require_fp8(models, config.precision.fp8, parallel.host)
    checkpoints = CheckpointManager(
        rundir.checkpoints, config.checkpoint.keep, parallel.rank, parallel.host
    )
    _load_start(config, stop, actor, critic, resumed=resume is not None)
    has_reference = _start_reference(config, stop, parallel, actor, folder / REFERENCE)
    step = resume or 0
    loop_state: dict[str, Any] | None = None
    if resume is not None:
        stop.where = f"loading checkpoint {resume}"
        loop_state = checkpoints.loop_state(resume)
        for name, model in _trained(actor, critic).items():
            load_trained(model, folder / name)
    reporter = _start_reporter(config, rundir, parallel, resume, stack)
    reporter.note(describe(ops, parallel.device))
    _tell_fp8(fp8, rundir, reporter)
    stop.where = "starting the source of samples"
    nodes = find_nodes(parallel.local_rank, parallel.host, config.run.timeout_s)
    surroundings = Surroundings(config, rundir, job, parallel, nodes, actor, stop, reporter.note)
    source = SOURCES[config.run.mode](surroundings)
    stack.callback(source.close)
    controllers = Controllers.of(config.algo)
    if loop_state is not None:
        source.load_state(loop_state["source"], folder / SAMPLES, step)
        controllers.load_state(loop_state.get("controllers", {}))  # older ones have none
    parts = Parts(
        *(config, rundir, parallel, actor, critic, source, checkpoints, reporter),
        *(PhaseTimer(), stop, controllers, nodes, ops),
        has_reference or moving_reference(config),
    )
    return parts, step


def _trained(actor: MegatronActor, critic: MegatronCritic | None) -> dict[str, TrainedModel]:
    return {MEGATRON: actor} if critic is None else {MEGATRON: actor, CRITIC: critic}


def _require_same_models(
    config: Config,
    spec: ModelSpec,
    critic_spec: ModelSpec | None,
    own: Path | None,
    parallel: Parallel,
) -> None:
    """Every checkpoint that will be loaded is of the model that the run's config.json describes;
    ``own``: the run's, where it goes on. As rank 0 sees it. Raises DataError with all differences.
    """

    def compare() -> None:
        found: list[str] = []
        policy = (spec, config.model.hf)
        load = config.model.load
        if load is not None and (own is None or needs_reference(config)):
            found += config_contradictions(load / MODEL, *policy)
        if own is not None:
            found += config_contradictions(own / MODEL, *policy)
        start = own or config.critic_load
        if critic_spec is not None and start is not None:
            its = start / CRITIC_MODEL
            if its.is_file():
                found += config_contradictions(its, critic_spec, config.critic_hf)
            elif not (start / CRITIC).is_dir():  # the policy's weights below a new head
                about = (start / MODEL, critic_spec, config.critic_hf)
                found += config_contradictions(*about, NOT_OF_THE_BODY)
        require_no_contradictions(found)

    error: Exception | None = None
    if parallel.rank == 0:
        try:
            compare()
        except DataError as e:
            error = e
    agree(error, parallel.host, "comparing checkpoints with config.json")


def _build_critic(config: Config, spec: ModelSpec, parallel: Parallel) -> MegatronCritic:
    mesh = mesh_of(config.critic_parallel, row_alignment(config.precision.fp8))
    beside = init_beside(parallel, mesh, timeout_s=config.run.timeout_s)
    return build_critic(config, spec, beside, critic_optimizer_steps(config))


def _load_start(
    config: Config,
    stop: StopRequest,
    actor: MegatronActor,
    critic: MegatronCritic | None,
    *,
    resumed: bool,
) -> None:
    """Weights of the checkpoints that the run starts from. A resumed run has its own, but its
    reference policy may be the one of its start.
    """
    path = config.model.load
    if path is not None and (not resumed or needs_reference(config)):
        stop.where = f"loading {path}"
        with actor.resident():
            load_model(actor.model, actor.parallel, path / MEGATRON)
            actor.optimizer.reload_model_params()
    if critic is not None and config.critic_load is not None and not resumed:
        stop.where = f"loading {config.critic_load} into the critic"
        load_start(critic, config.critic_load)


def _start_reference(
    config: Config, stop: StopRequest, parallel: Parallel, actor: MegatronActor, saved: Path
) -> bool:
    """The reference policy that a resumed run left, or the model as it is now, if one is wanted.
    Whether one was left, as rank 0 sees it: every rank takes the same way.
    """
    left = bool(broadcast_json(saved.is_dir(), 0, parallel.host))
    if left:
        stop.where = f"loading {saved}"
        actor.load_reference(saved)
    elif needs_reference(config):
        actor.keep_reference()
    return left


def _start_reporter(
    config: Config, rundir: RunDir, parallel: Parallel, resume: int | None, stack: ExitStack
) -> Reporter:
    reporter = Reporter(
        rundir,
        total_steps=config.run.steps,
        rank=parallel.rank,
        tensorboard=config.monitor.tensorboard,
        resume_step=resume,
    )
    stack.callback(reporter.close)
    return reporter


def _tell_fp8(fp8: dict[str, Report] | None, rundir: RunDir, reporter: Reporter) -> None:
    """What is in FP8, of every model: in the log, above the progress and in the run directory."""
    for name, report in (fp8 or {}).items():
        line = f"{name}: {describe_fp8(report)}"
        log.info(line)
        reporter.note(line)
    if fp8 is not None:
        rundir.fp8.write_text(json.dumps(fp8, indent=1) + "\n")


def ranks_of(parallel: Parallel) -> Ranks:
    return Ranks(
        gather=partial(gather_and_share, group=parallel.host),
        holds=parallel.last_stage,
        speaks=parallel.speaks_for_rows,
    )


def mesh_of(p: ParallelSection, align: int = 1) -> Mesh:
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
        align=align,
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
            found = f"{rundir.root}, which already holds a run"
            accepted = "another folder, or run.resume=true to go on with that run"
            raise ConfigError([Problem("run.dir", found, accepted)])
        steps = CheckpointManager.complete_steps(rundir.checkpoints)
        if not steps:
            found = f"true, but {rundir.checkpoints} holds no complete checkpoint"
            raise ConfigError([Problem("run.resume", found, "false, and another run.dir")])
        resume = steps[-1]
    elif config.run.resume:
        found = f"true, but {rundir.root} holds no run"
        raise ConfigError([Problem("run.resume", found, "false for a new run")])
    rundir.config.write_text(dump_given(config))
    rundir.resolved_config.write_text(dump_resolved(config))
    return resume
