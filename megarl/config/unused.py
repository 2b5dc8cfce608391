"""Settings that would have no effect: what a run of this kind never reads, as one table.

A setting that was given but is not read is an error, because whoever wrote it expects something of
it. Writing down that something is off (``eval.every: 0``, ``model.load: null``) is no error: it is
true.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megarl.config.fields import given_keys, lookup
from megarl.config.schema import Config
from megarl.errors import Problem


@dataclass(frozen=True)
class Rule:
    """Where ``when(config, experts)`` holds, ``keys`` are not read. ``sync.*`` is a whole section.

    ``experts`` of the model are None where its config.json is not at hand. ``instead``: what to do.
    """

    when: Callable[[Config, int | None], bool]
    keys: tuple[str, ...]
    reason: str
    instead: str = "leave it out"
    but: tuple[str, ...] = ()  # exceptions to a whole section

    def covers(self, key: str) -> bool:
        wide = f"{key.partition('.')[0]}.*"
        return (key in self.keys or wide in self.keys) and key not in self.but


def _managed(engine: str) -> Callable[[Config, int | None], bool]:
    return lambda c, _: c.run.mode == "rl" and not c.rollout.urls and c.rollout.engine == engine


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
            *("data.samples_per_prompt", "algo.advantage", "algo.old_logprobs"),
            *("rollout.*", "sync.*", "eval.*"),
            *("monitor.samples_per_step", "monitor.record_rollouts"),
        ),
        "run.mode=sft trains on data.demonstrations: nothing is sampled, scored or sent on",
        "leave it out, or run.mode=rl",
    ),
    Rule(
        lambda c, _: c.run.mode == "train_only",
        (
            *("data.prompts", "data.heldout", "data.demonstrations", "data.reward"),
            *("data.prompts_per_step", "data.samples_per_prompt"),
            *("rollout.*", "sync.*", "eval.*"),
            *("monitor.samples_per_step", "monitor.record_rollouts"),
        ),
        "run.mode=train_only replays data.recorded: its prompts, samples and rewards are fixed",
        "leave it out, or run.mode=rl",
        but=("rollout.temperature",),  # the trainer's log-probs are of the tempered distribution
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and bool(c.rollout.urls),
        (
            *("rollout.port", "rollout.max_running", "rollout.fixed_shape"),
            *("rollout.server_command", "rollout.server_args"),
        ),
        "the servers of rollout.urls already run with settings of their own",
        "leave it out, or leave out rollout.urls",
    ),
    Rule(
        _managed("sglang"),
        ("rollout.max_running", "rollout.fixed_shape"),
        "it is of the embedded server, and rollout.engine=sglang",
        "rollout.server_args for SGLang's own options",
    ),
    Rule(
        _managed("embedded"),
        ("rollout.server_command", "rollout.server_args", "rollout.server_tp"),
        "it is of a managed SGLang server, and rollout.engine=embedded",
        "leave it out, or rollout.engine=sglang",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and c.data.heldout is None,
        ("eval.max_new_tokens",),
        "there are no held-out prompts to evaluate on",
        "leave it out, or set data.heldout and eval.every",
    ),
    Rule(
        lambda c, _: c.run.mode == "rl" and c.eval.every == 0,
        ("data.heldout", "eval.max_new_tokens"),
        "eval.every=0: there is no evaluation",
        "leave it out, or set eval.every",
    ),
    Rule(
        lambda c, _: c.optim.decay_fraction == 0,
        ("optim.min_lr_ratio",),
        "optim.decay_fraction=0: the learning rate does not fall",
        "leave it out, or set optim.decay_fraction",
    ),
    Rule(
        lambda _, experts: experts == 0,
        ("parallel.etp",),
        "the model has no experts",
    ),
)


def unused_settings(config: Config, experts: int | None) -> Iterator[Problem]:
    """A Problem for everything that was set and will not be read."""
    active = [rule for rule in RULES if rule.when(config, experts)]
    for key, value in given_keys(config).items():
        rule = next((r for r in active if r.covers(key)), None)
        if rule is not None and not _says_off(key, value):
            found = f"{_text(value)}, which has no effect ({rule.reason})"
            yield Problem(key, found, rule.instead)


def _says_off(key: str, value: object) -> bool:
    if value not in (None, False, 0, (), ""):
        return False
    parent, _, name = key.rpartition(".")
    section = type(lookup(_DEFAULTS, parent))
    return bool(section.model_fields[name].get_default() == value)


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


_DEFAULTS = Config.model_validate(
    {
        "run": {"dir": "x", "steps": 1},
        "model": {"hf": "x"},
        "optim": {"lr": 1.0},
        "algo": {"policy": {"name": "gspo"}},
    }
)
