"""The run, top to bottom: build the parts, then step after step until the last.

One step, on every rank:

1. **samples**: from the rollout servers, demonstrations or a recording (``sources.py``); facts of
   them everywhere, tokens where they were collected.
2. **plan**: optimizer steps and rows, of facts alone (``planning.py``); **exchange**: tokens to the
   ranks that use them (``data/exchange.py``), as packed rows; **old and reference log-probs**, and
   a critic's **values**: forward passes; **advantages** and what weighs every token
   (``experience.py``).
3. **train**: the actor's forward and backward passes (``actor/step.py``), then the critic's; in
   ``critic.warmup_steps`` the critic's alone.
4. **after the update**: new weights to the servers, held-out evaluation (``sources.py``).
5. **report** and, when due, **checkpoint**.

``step`` counts finished training steps; weights version k is the weights after step k. Stopping is
decided by all ranks together, at the same step.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from megarl.actor.residence import WEIGHTS
from megarl.actor.state import parameter_bytes, save_trained, weight_bytes
from megarl.checkpoint.manager import CRITIC_MODEL, MODEL, REFERENCE, SAMPLES, WriteParts
from megarl.config.schema import Config
from megarl.data.exchange import Collected, Delivery
from megarl.experience import complete_plan, moving_reference
from megarl.hostcomm import any_rank, gather_bytes
from megarl.monitor.metrics import decode, derived, encode, merge_metrics, reduce_metrics
from megarl.operators import all_calls, write_calls
from megarl.parts import Parts, build, ranks_of
from megarl.planning import plan_step
from megarl.relayout import move
from megarl.rundir import RunDir
from megarl.stopping import StopRequest
from megarl.types import Job, Max, Metric, StepMetrics, Sum, TrainPlan

log = logging.getLogger(__name__)

_TIDY_S = 5.0  # for closing what is open after an error


def run(config: Config, rundir: RunDir, job: Job, stop: StopRequest) -> None:
    """Train to ``run.steps``, or to the step in which a stop was asked for. Collective over all
    trainer ranks.
    """
    with ExitStack() as stack:
        try:
            _steps(*build(config, rundir, job, stop, stack))
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
    with parts.actor.resident(WEIGHTS):
        metrics = parts.source.start(step)
    if step == 0:  # a resumed run has this step's line already
        _report(parts, step, metrics, [])
    while step < config.run.steps and not any_rank(stop.requested, parts.parallel.host):
        stop.where = f"step {step + 1}"
        if not train_step(parts, step + 1):
            break
        step += 1
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            save(parts, step)
            saved = step
    if saved != step:
        save(parts, step)
    if step == config.run.steps:
        parts.source.finish(step)
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


def train_step(parts: Parts, step: int) -> bool:
    """The stages of the module docstring. False where the run is to end and there are no samples
    yet: nothing has changed.
    """
    timer, actor, critic, parallel = parts.timer, parts.actor, parts.critic, parts.parallel
    with timer("step"):
        with timer("rollout"):
            taken = parts.source.take(step)
            if taken is None:
                return False
            samples, metrics = taken
            facts = [s.facts for s in samples]
        with timer("plan"):
            plan, moved = plan_step(
                samples, parts.config, parallel.mesh, actor.spec, parts.nodes, step
            )
            critics_plan, moved_again = _critics_plan(parts, plan, samples, step)
        with timer("old_logprobs"):
            actor.logprobs(plan)
        if critic is not None:
            with timer("values"):
                critic.values(critics_plan)
                if critics_plan is not plan:
                    move("values", facts, (critics_plan, critic.parallel), (plan, parallel))
        policy_trains = step > parts.config.critic.warmup_steps
        with timer("advantages"):
            shared = complete_plan(
                *(plan, facts, parts.config, parts.controllers, ranks_of(parallel)),
                steer=policy_trains,
            )
        if policy_trains:
            with timer("train"):
                metrics += actor.train(plan)
        if critic is not None:
            with timer("train_critic"):
                if critics_plan is not plan:
                    move("returns", facts, (plan, parallel), (critics_plan, critic.parallel))
                metrics += critic.train(critics_plan)
        if moving_reference(parts.config, step):
            actor.keep_reference()
        with timer("sync"), actor.resident(WEIGHTS):
            metrics += parts.source.updated(step)
    if parallel.rank == 0:
        metrics += shared
        metrics.append(Metric("perf/tokens", Sum(float(sum(f.length for f in facts)))))
    deliveries = [moved, *moved_again]
    moved_bytes = sum(d.received + d.carried for d in deliveries)
    metrics.append(Metric("perf/exchange_bytes", Max(moved_bytes)))
    metrics.append(Metric("perf/exchange_seconds", Max(sum(d.seconds for d in deliveries))))
    with timer("eval"):
        metrics += parts.source.evaluate(step)
    _report(parts, step, metrics, samples)
    return True


def _critics_plan(
    parts: Parts, plan: TrainPlan, samples: Sequence[Collected], step: int
) -> tuple[TrainPlan, list[Delivery]]:
    """The critic's rows, and what was moved for them: the actor's, or the same samples packed for a
    layout of its own.
    """
    critic = parts.critic
    if critic is None or critic.parallel.mesh == parts.parallel.mesh:
        return plan, []
    own, moved = plan_step(
        *(samples, parts.config, critic.parallel.mesh, critic.spec, parts.nodes, step),
        replays=False,
    )
    return own, [moved]


def save(parts: Parts, step: int) -> None:
    """Checkpoint ``step``; everything a later run needs to go on from here."""
    parts.stop.where = f"checkpoint {step}"
    trained, actor = parts.trained, parts.actor
    write: WriteParts = {name: partial(save_trained, model) for name, model in trained.items()}
    num_bytes = sum(map(parameter_bytes, trained.values()))
    if parts.saves_reference:
        write[REFERENCE] = actor.save_reference
        num_bytes += weight_bytes(actor)
    if parts.source.leaves_samples:
        write[SAMPLES] = partial(parts.source.write, step=step)
    models = {MODEL: actor.spec.as_json()}
    if parts.critic is not None:
        models[CRITIC_MODEL] = parts.critic.spec.as_json()
    path = parts.checkpoints.save(
        step,
        loop_state={
            "source": parts.source.state(),
            "controllers": parts.controllers.state(),
        },
        models=models,
        hf_files=parts.config.model.hf,
        write_parts=write,
        num_bytes=num_bytes * parts.parallel.mesh.world_size + parts.source.num_bytes,
    )
    parts.reporter.note(f"checkpoint {path}")


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
