"""What the optimizer, its schedules, recomputation and overlap imply together."""

from collections.abc import Iterator

from megarl.config.layout import Dims
from megarl.config.schema import Config, OptimSection, ParallelSection
from megarl.errors import Problem

FP8_LAYERS = {"te": "transformer_engine", "emulated": "local"}  # by precision.fp8.backend


def training_problems(config: Config, dims: Dims | None) -> Iterator[Problem]:
    """``dims`` None: the model's config.json is not at hand, what it decides is not checked."""
    yield from _schedule(config)
    yield from _optimizer(config)
    yield from _overlap(config)
    yield from _replay(config)
    yield from _layers(config)
    if dims is not None and dims.layers:
        yield from _recompute(config, dims)


def optimizer_steps(config: Config) -> int:
    """The policy's optimizer steps of the whole run: its learning-rate schedule's clock."""
    return (config.run.steps - config.critic.warmup_steps) * config.algo.minibatches


def critic_optimizer_steps(config: Config) -> int:
    """The critic's, likewise."""
    return config.run.steps * config.algo.minibatches


def _replay(config: Config) -> Iterator[Problem]:
    moe = config.moe
    if moe.routing_replay == "none":
        return
    replay = f"moe.routing_replay={moe.routing_replay}"
    if moe.routing_replay == "old_logprobs" and config.algo.old_logprobs != "recompute":
        found = f"old_logprobs with algo.old_logprobs={config.algo.old_logprobs}"
        yield Problem("moe.routing_replay", found, "none, rollout, or algo.old_logprobs=recompute")
    if moe.router_fusion:
        yield Problem("moe.router_fusion", "true", f"false: its choice is fixed ({replay})")
    if moe.router_bias_update_rate:
        accepted = f"0: a choice that is replayed says nothing about the router's loads ({replay})"
        yield Problem("moe.router_bias_update_rate", f"{moe.router_bias_update_rate:g}", accepted)


def _schedule(config: Config) -> Iterator[Problem]:
    warmup, steps = config.critic.warmup_steps, config.run.steps
    if warmup >= steps:
        yield Problem("critic.warmup_steps", str(warmup), f"less than run.steps = {steps}")
        return
    yield from _schedule_of("optim", config.optim, optimizer_steps(config))
    if config.critic.lr is not None and config.critic.optim.model_fields_set:
        total = critic_optimizer_steps(config)
        yield from _schedule_of("critic.optim", config.critic_optim, total)
    schedule, key = config.optim.schedule, "optim.schedule.end_weight_decay"
    if schedule.weight_decay != "constant":
        end = schedule.end_weight_decay
        if end is None or end < config.optim.weight_decay:
            accepted = f"a number >= optim.weight_decay = {config.optim.weight_decay:g}"
            yield Problem(key, "nothing" if end is None else f"{end:g}", accepted)


def _schedule_of(key: str, optim: OptimSection, total: int) -> Iterator[Problem]:
    for i, beta in enumerate(optim.betas):
        if not 0 <= beta < 1:
            yield Problem(f"{key}.betas[{i}]", str(beta), "a number >= 0 and < 1")
    decay = round(optim.decay_fraction * total) if optim.schedule.lr == "wsd" else 0
    if optim.warmup_steps >= total or optim.warmup_steps + decay > total:
        falling = f", the last {decay} of which fall ({key}.decay_fraction)" if decay else ""
        accepted = f"less than the run's {total} optimizer steps{falling}"
        yield Problem(f"{key}.warmup_steps", str(optim.warmup_steps), accepted)


def _optimizer(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.name == "muon":
        if optim.distributed:
            accepted = "false: optim.name=muon keeps its matrices whole"
            yield Problem("optim.distributed", "true", accepted)
        for name in ("precision_aware", "cpu_offload"):
            if getattr(optim, name) is not None:
                yield Problem(f"optim.{name}", "a section", "null: it is of optim.name=adam")
    elif not optim.distributed:
        for name in ("precision_aware", "cpu_offload"):
            if getattr(optim, name) is not None:
                accepted = f"true: optim.{name} works on the distributed optimizer's state"
                yield Problem("optim.distributed", "false", accepted)


def _overlap(config: Config) -> Iterator[Problem]:
    overlap = config.overlap
    if overlap.param_gather and not overlap.grad_reduce:
        accepted = "true: overlap.param_gather gathers what it has reduced"
        yield Problem("overlap.grad_reduce", "false", accepted)
    if overlap.moe_shared_expert and config.moe.token_dispatcher == "allgather":
        accepted = "alltoall or flex, with overlap.moe_shared_expert"
        yield Problem("moe.token_dispatcher", "allgather", accepted)


def _layers(config: Config) -> Iterator[Problem]:
    impl, fp8 = config.train.transformer_impl, config.precision.fp8
    if fp8 is not None and impl not in ("auto", FP8_LAYERS[fp8.backend]):
        accepted = (
            f"auto, {FP8_LAYERS[fp8.backend]}: precision.fp8.backend={fp8.backend} is in these"
        )
        yield Problem("train.transformer_impl", impl, accepted)


def _recompute(config: Config, dims: Dims) -> Iterator[Problem]:
    recompute, p = config.recompute, config.parallel
    key = "recompute.modules"
    absent = {
        "moe": (not dims.experts, "the model has no experts"),
        "shared_experts": (not dims.shared_ffn, "the model has no shared experts"),
        "mlp": (not dims.dense_ffn, "every layer has experts instead of a feed-forward"),
        "mla_up_proj": (not dims.latent, "the model has no latent attention"),
    }
    if recompute.granularity == "selective":
        if not recompute.modules:
            yield Problem(key, "[]", "at least one module, or recompute.granularity=none")
        for module in recompute.modules:
            wrong, why = absent.get(module, (False, ""))
            if wrong:
                yield Problem(key, module, f"modules that the model has: {why}")
        if "shared_experts" in recompute.modules and config.overlap.moe_shared_expert:
            accepted = "modules without shared_experts, with overlap.moe_shared_expert"
            yield Problem(key, "shared_experts", accepted)
    chunk = _largest_stage(p, dims.layers) // p.vpp
    if recompute.granularity == "full" and recompute.num_layers > max(chunk, 1):
        accepted = f"at most the {chunk} layers of the largest chunk of a pipeline stage"
        yield Problem("recompute.num_layers", str(recompute.num_layers), accepted)
    if config.overlap.moe_shared_expert and dims.experts and not dims.shared_ffn:
        yield Problem("overlap.moe_shared_expert", "true", "false: the model has no shared experts")


def _largest_stage(p: ParallelSection, layers: int) -> int:
    given = [n for n in (p.first_layers, p.last_layers) if n is not None]
    others = p.pp - len(given)
    return max([*given, (layers - sum(given)) // others] if others > 0 else given)
