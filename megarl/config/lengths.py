"""Do responses fit where they have to, and do their lengths' settings agree with each other?

1. A server's sequence holds a prompt and the longest response; a packed row any such sequence.
2. Every stage of ``rollout.length_stages`` but the last ends, in one way, before the run does; its
   responses are shorter than the next stage's.
3. ``algo.overlong`` punishes lengths between l_max - l_cache and l_max, which responses reach.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.rollout import LengthStage
from megarl.config.schema import Config
from megarl.errors import Problem

_STAGES = "rollout.length_stages"


def length_problems(config: Config, hf: Mapping[str, Any] | None) -> Iterator[Problem]:
    if config.run.mode == "rl":
        yield from _room(config, hf)
        yield from _stages(config)
    if config.run.mode != "sft":
        yield from _overlong(config)


def longest(config: Config) -> tuple[str, int]:
    """The setting that allows the longest response, and that length."""
    stages = config.rollout.length_stages
    if not stages:
        return "rollout.max_new_tokens", config.rollout.max_new_tokens
    tokens, i = max((stage.max_new_tokens, i) for i, stage in enumerate(stages))
    return f"{_STAGES}[{i}].max_new_tokens", tokens


def _room(config: Config, hf: Mapping[str, Any] | None) -> Iterator[Problem]:
    context, row = config.rollout.context_length, config.train.row_tokens
    wanted = dict([longest(config)])
    if config.eval.every and config.data.heldout is not None:
        wanted["eval.max_new_tokens"] = config.eval.max_new_tokens
    for i, chosen in enumerate(config.eval.sets):
        own = chosen.max_new_tokens
        key = "eval.max_new_tokens" if own is None else f"eval.sets[{i}].max_new_tokens"
        wanted[key] = own or config.eval.max_new_tokens
    for key, tokens in wanted.items():
        if tokens >= context:
            accepted = f"less than rollout.context_length = {context}, minus a prompt"
            yield Problem(key, str(tokens), accepted)
    if row < context:
        accepted = f"at least rollout.context_length = {context}: a sample fits a row"
        yield Problem("train.row_tokens", str(row), accepted)
    limit = (hf or {}).get("max_position_embeddings")
    if isinstance(limit, int) and context > limit:
        accepted = f"at most max_position_embeddings = {limit} of the model"
        yield Problem("rollout.context_length", str(context), accepted)


def _stages(config: Config) -> Iterator[Problem]:
    stages = config.rollout.length_stages
    tokens, step = 0, 0  # of the stages before
    for i, stage in enumerate(stages):
        key = f"{_STAGES}[{i}]"
        yield from _end(key, stage, last=i == len(stages) - 1)
        if stage.max_new_tokens <= tokens:
            accepted = f"more than the {tokens} of the stage before"
            yield Problem(f"{key}.max_new_tokens", str(stage.max_new_tokens), accepted)
        tokens = stage.max_new_tokens
        if stage.until_step is not None and i < len(stages) - 1:
            if not step < stage.until_step < config.run.steps:
                after = f"more than the {step} of an earlier stage, and " if step else ""
                accepted = f"{after}less than run.steps = {config.run.steps}"
                yield Problem(f"{key}.until_step", str(stage.until_step), accepted)
            step = max(step, stage.until_step)


def _end(key: str, stage: LengthStage, *, last: bool) -> Iterator[Problem]:
    ends = {"until_step": stage.until_step, "until_converged": stage.until_converged}
    given = {name: str(end) for name, end in ends.items() if end is not None}
    if not last and len(given) != 1:
        accepted = "one of until_step and until_converged: every stage but the last ends"
        yield Problem(key, " and ".join(given) or "no end", accepted)
    for name, end in given.items() if last else ():
        accepted = "nothing: the last stage lasts to the end of the run"
        yield Problem(f"{key}.{name}", end, accepted)


def _overlong(config: Config) -> Iterator[Problem]:
    overlong = config.algo.overlong
    if overlong is None:
        return
    if overlong.l_cache > overlong.l_max:
        accepted = f"at most algo.overlong.l_max = {overlong.l_max}"
        yield Problem("algo.overlong.l_cache", str(overlong.l_cache), accepted)
        return
    free = overlong.l_max - overlong.l_cache
    key, tokens = longest(config)
    if config.run.mode == "rl" and free >= tokens:
        reason = f"responses have at most {key} = {tokens} tokens"
        found = f"l_max - l_cache = {free}, which has no effect ({reason})"
        yield Problem("algo.overlong", found, f"l_max - l_cache below {tokens}, or leave it out")
