"""Settings that would have no effect: what a run of this kind never reads, as one table.

A setting that was given but is not read is an error, because whoever wrote it expects something of
it. Writing down that something is off (``eval.every: 0``, ``model.load: null``) is no error: it is
true.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from megarl.config.fields import field_of, given_keys
from megarl.config.fp8 import Fp8Section
from megarl.config.rollout import spans_versions, stops_half_way
from megarl.config.schema import Config
from megarl.errors import Problem


@dataclass(frozen=True)
class Rule:
    """Where ``when(config, experts)`` holds, ``keys`` are not read. ``sync.*`` is a whole section,
    ``algo.kl.*`` one inside another.

    ``experts`` of the model are None where its config.json is not at hand. ``instead``: what to do.
    """

    when: Callable[[Config, int | None], bool]
    keys: tuple[str, ...]
    reason: str
    instead: str = "leave it out"
    but: tuple[str, ...] = ()  # exceptions to a whole section

    def covers(self, key: str) -> bool:
        parts = key.split(".")
        names = {key} | {".".join([*parts[:n], "*"]) for n in range(1, len(parts) + 1)}
        return not names.isdisjoint(self.keys) and names.isdisjoint(self.but)


def _managed(engine: str) -> Callable[[Config, int | None], bool]:
    return lambda c, _: c.run.mode == "rl" and not c.rollout.urls and c.rollout.engine == engine


def _fp8(of: Callable[[Fp8Section], bool]) -> Callable[[Config, int | None], bool]:
    return lambda c, _: c.precision.fp8 is not None and of(c.precision.fp8)


def _surplus(config: Config) -> bool:
    """Whether what was sampled for one step may be trained by another."""
    rollout, dynamic = config.rollout, config.algo.dynamic_sampling is not None
    return rollout.schedule != "synchronous" or rollout.over_sampling > 1 or dynamic


def _wsd(config: Config) -> bool:
    return config.optim.schedule.lr == "wsd"


RULES = (
    Rule(
        lambda c, _: c.run.mode == "rl",
        ("data.demonstrations", "data.recorded"),
        "run.mode=rl trains on what it samples from data.prompts",
        "leave it out, or set run.mode to sft (demonstrations) or train_only (recorded)",
    ),
    Rule(
        lambda c, _: c.run.mode == "sft",
        (
            *("data.prompts", "data.heldout", "data.recorded", "data.reward"),
            *("data.reward_timeout_s", "data.samples_per_prompt", "rollout.*", "sync.*", "eval.*"),
            *("on_failure.servers", "on_failure.collectors"),
            *("monitor.samples_per_step", "monitor.record_rollouts"),
        ),
        "run.mode=sft trains on data.demonstrations: nothing is sampled, scored or sent on",
        "leave it out, or run.mode=rl",
    ),
    Rule(
        lambda c, _: c.run.mode == "sft",
        (
            *("algo.advantage.*", "algo.kl.*", "algo.correction.*", "algo.opsm.*", "algo.value.*"),
            *("algo.overlong.*", "algo.overlong_filter", "algo.dynamic_sampling.*"),
            *("algo.old_logprobs", "algo.aggregation.denominator_mask"),
        ),
        "run.mode=sft imitates: of algo.* it reads policy, aggregation, entropy and minibatches",
        "leave it out, or run.mode=rl",
    ),
    Rule(
        lambda c, _: c.run.mode == "sft",
        ("moe.routing_replay",),
        "run.mode=sft has neither rollouts nor a pass before the update",
        "leave it out, or run.mode=rl",
    ),
    Rule(
        lambda c, _: c.run.mode == "train_only",
        (
            *("data.prompts", "data.heldout", "data.demonstrations", "data.reward"),
            *("data.reward_timeout_s", "data.prompts_per_step", "data.samples_per_prompt"),
            *("rollout.*", "sync.*", "eval.*", "on_failure.servers", "on_failure.collectors"),
            *("monitor.samples_per_step", "monitor.record_rollouts"),
        ),
        "run.mode=train_only replays data.recorded: its prompts, samples and rewards are fixed",
        "leave it out, or run.mode=rl",
        but=("rollout.temperature",),  # the trainer's log-probs are of the tempered distribution
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and c.sync.transport != "disk",
        ("sync.folder",),
        "it is of sync.transport=disk",
        "leave it out, or sync.transport=disk",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and c.sync.transport != "broadcast",
        ("sync.backend",),
        "it is of sync.transport=broadcast",
        "leave it out, or sync.transport=broadcast",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and bool(c.rollout.length_stages),
        ("rollout.max_new_tokens",),
        "rollout.length_stages has a max_new_tokens for every stage",
        "leave out one of the two",
    ),
    Rule(
        lambda c, _: c.run.mode != "sft" and c.algo.correction is None,
        ("algo.aggregation.denominator_mask",),
        "without algo.correction no token is rejected",
        "leave it out, or set algo.correction",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and bool(c.rollout.urls),
        (
            *("rollout.port", "rollout.max_running", "rollout.fixed_shape", "rollout.fp8"),
            *("rollout.server_command", "rollout.server_args", "rollout.servers"),
            *("rollout.server_ep", "rollout.server_dp", "rollout.router_command"),
        ),
        "the servers of rollout.urls already run with settings of their own",
        "leave it out, or leave out rollout.urls",
    ),
    Rule(
        _managed("sglang"),
        ("rollout.max_running", "rollout.fixed_shape", "rollout.fp8"),
        "it is of the embedded server, and rollout.engine=sglang",
        "rollout.server_args for SGLang's own options",
    ),
    Rule(
        _managed("embedded"),
        (
            *("rollout.server_command", "rollout.server_args"),
            *("rollout.server_tp", "rollout.server_ep", "rollout.server_dp"),
        ),
        "it is of a managed SGLang server, and rollout.engine=embedded",
        "leave it out, or rollout.engine=sglang",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and c.rollout.schedule != "asynchronous",
        ("rollout.pause_mode",),
        "no request runs while weights arrive, unless rollout.schedule=asynchronous",
        "leave it out, or rollout.schedule=asynchronous",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and not stops_half_way(c.rollout),
        ("rollout.partial",),
        "no response is stopped half-way: that takes rollout.over_sampling above 1 or, with "
        "rollout.schedule=asynchronous, rollout.pause_mode=abort",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and not spans_versions(c.rollout),
        ("rollout.mask_continued",),
        "no response of several weights is trained: that takes rollout.schedule=asynchronous or "
        "rollout.over_sampling above 1, rollout.partial=continue where they are stopped half-way, "
        "and a rollout.max_staleness that keeps them",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and not _surplus(c) and c.rollout.max_staleness != 0,
        ("rollout.max_staleness",),
        "every step trains what it has sampled itself: rollout.schedule=synchronous, without "
        "over-sampling or dynamic sampling",
    ),
    Rule(
        lambda c, _: (
            {c.on_failure.servers, c.on_failure.collectors, c.on_failure.trainer} == {"stop"}
        ),
        ("on_failure.max_restarts",),
        "nothing is started again: on_failure has stop for all",
        "leave it out, or restart for a part",
    ),
    Rule(
        lambda c, _: (
            c.run.mode == "rl"
            and c.data.heldout is None
            and all(chosen.max_new_tokens for chosen in c.eval.sets)
        ),
        ("eval.max_new_tokens",),
        "there are no held-out prompts to evaluate on",
        "leave it out, or set data.heldout and eval.every",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and c.eval.every == 0,
        ("data.heldout",),
        "eval.every=0: there is no evaluation",
        "leave it out, or set eval.every",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and c.eval.every == 0 and not c.eval.sets,
        ("eval.max_new_tokens",),
        "eval.every=0: there is no evaluation",
        "leave it out, or set eval.every",
    ),
    Rule(
        lambda c, _: not c.algo.needs_values,
        ("critic.*",),
        "only algo.advantage.name=gae has a use for values",
        "leave it out, or set algo.advantage.name=gae",
    ),
    Rule(
        lambda c, _: c.critic.lr is None,
        ("critic.*",),
        "critic.lr=null: there is no critic",
        "leave it out, or set critic.lr",
        but=("critic.lr",),
    ),
    Rule(
        lambda c, _: c.optim.schedule.lr != "wsd",
        ("optim.decay_fraction", "critic.optim.decay_fraction", "optim.schedule.wsd_decay"),
        "it is of optim.schedule.lr=wsd",
    ),
    Rule(
        lambda c, _: c.optim.schedule.lr == "constant",
        ("optim.min_lr_ratio", "critic.optim.min_lr_ratio"),
        "optim.schedule.lr=constant: the learning rate does not fall",
    ),
    Rule(
        lambda c, _: _wsd(c) and c.critic.lr is not None and c.critic_optim.decay_fraction == 0,
        ("critic.optim.min_lr_ratio",),
        "the critic's learning rate does not fall",
        "leave it out, or set critic.optim.decay_fraction",
    ),
    Rule(
        lambda c, _: _wsd(c) and c.optim.decay_fraction == 0 and not c.critic.optim.decay_fraction,
        ("optim.min_lr_ratio", "optim.schedule.wsd_decay"),
        "optim.decay_fraction=0: the learning rate does not fall",
        "leave it out, or set optim.decay_fraction",
    ),
    Rule(
        lambda c, _: c.optim.schedule.weight_decay == "constant",
        ("optim.schedule.end_weight_decay",),
        "optim.schedule.weight_decay=constant",
        "leave it out, or optim.schedule.weight_decay=linear",
    ),
    Rule(
        lambda c, _: c.optim.name != "muon",
        ("optim.muon.*",),
        "optim.name=adam",
        "leave it out, or optim.name=muon",
    ),
    Rule(
        lambda c, _: c.precision.dtype == "fp32",
        ("precision.grad_reduce_dtype",),
        "precision.dtype=fp32: gradients have the parameters' precision",
        "leave it out, or precision.dtype=bf16",
    ),
    Rule(
        lambda c, _: c.recompute.granularity != "selective",
        ("recompute.modules",),
        "it is of recompute.granularity=selective",
    ),
    Rule(
        lambda c, _: c.recompute.granularity != "full",
        ("recompute.method", "recompute.num_layers"),
        "it is of recompute.granularity=full",
    ),
    Rule(
        lambda c, _: c.parallel.dp * c.parallel.cp == 1,
        ("overlap.grad_reduce", "overlap.param_gather"),
        "dp * cp = 1: there is no other rank to reduce over or gather from",
    ),
    Rule(
        lambda c, _: not c.optim.distributed,
        ("overlap.param_gather",),
        "optim.distributed=false: every rank has all parameters",
    ),
    Rule(
        lambda c, _: c.algo.minibatches == 1,
        ("overlap.param_gather",),
        "algo.minibatches=1: parameters are needed at once after the only update of a step",
    ),
    Rule(
        lambda _, experts: experts == 0,
        ("parallel.etp", "moe.*", "overlap.moe_shared_expert", "monitor.moe_layers"),
        "the model has no experts",
    ),
    Rule(
        lambda c, experts: experts == 0 and c.critic.hf is None,
        ("critic.parallel.etp",),
        "the model has no experts",
    ),
    Rule(
        lambda c, _: c.moe.token_dispatcher != "flex",
        ("moe.flex_backend",),
        "it is of moe.token_dispatcher=flex",
    ),
    Rule(
        _fp8(lambda section: section.recipe != "blockwise"),
        ("precision.fp8.scales",),
        "it is of precision.fp8.recipe=blockwise",
    ),
    Rule(
        _fp8(lambda section: section.recipe != "delayed"),
        ("precision.fp8.amax_history", "precision.fp8.amax_algo", "precision.fp8.margin"),
        "it is of precision.fp8.recipe=delayed",
    ),
    Rule(
        _fp8(lambda section: section.amax_algo == "most_recent"),
        ("precision.fp8.amax_history",),
        "precision.fp8.amax_algo=most_recent looks at one step",
    ),
    Rule(
        _fp8(lambda section: section.backend == "emulated"),
        ("precision.fp8.param_gather",),
        "precision.fp8.backend=emulated keeps parameters in bf16",
    ),
)


def unused_settings(config: Config, experts: int | None) -> Iterator[Problem]:
    """A Problem for everything that was set and will not be read."""
    active = [rule for rule in RULES if rule.when(config, experts)]
    for key, value in given_keys(config).items():
        rule = next((r for r in active if r.covers(key)), None)
        if rule is not None and not _says_off(config, key, value):
            found = f"{_text(value)}, which has no effect ({rule.reason})"
            yield Problem(key, found, rule.instead)


def _says_off(config: Config, key: str, value: object) -> bool:
    if value not in (None, False, 0, (), "", "none"):
        return False
    return bool(field_of(config, key).get_default() == value)


def _text(value: object) -> str:
    """In YAML's words; of sections what was set in them."""
    if isinstance(value, tuple):
        return str([_plain(item) for item in value])
    return str(_plain(value))


def _plain(value: object) -> object:
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
