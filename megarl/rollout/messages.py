"""Requests and outcomes as frames (`frames.py`): what the two processes of a collector say.

A group's tokens, masks, log-probs and rewards travel as one array each, its routing as one array a
sample. What the trainer's side knows by the serial, prompt and seeds, does not travel back.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megarl.errors import ConfigError, DataError, MegarlError, Problem, RunError, ServerError
from megarl.rollout.frames import Array
from megarl.types import (
    GroupOutcome,
    GroupRequest,
    Member,
    Prompt,
    RoutingShape,
    Sample,
    Sampling,
    VersionSpan,
)

Json = dict[str, Any]
_ERRORS: dict[str, type[MegarlError]] = {
    e.__name__: e for e in (DataError, ServerError, RunError, MegarlError)
}


@dataclass(frozen=True)
class CollectorSettings:
    """Plain values: they cross to another process. Names are those of the configuration."""

    hf: Path  # folder of the model, for its tokenizer
    eos_ids: tuple[int, ...]  # that a response ends with, besides the tokenizer's
    reward: str  # `data.reward`
    key_file: Path  # with the servers' key
    log_file: Path  # what the process says
    reward_timeout_s: float = 60.0
    partial: Literal["continue", "restart", "discard"] = "continue"
    mask_continued: bool = False
    max_attempts: int = 5
    max_in_flight: int | None = None
    request_timeout_s: float = 600.0
    routing: RoutingShape | None = None  # what servers are asked for beside tokens
    seed: int = 0  # `run.seed`, of evaluations

    def to_json(self) -> Json:
        return {**asdict(self), "hf": str(self.hf)} | {
            name: str(getattr(self, name)) for name in ("key_file", "log_file")
        }

    @staticmethod
    def from_json(given: Json) -> "CollectorSettings":
        paths = {name: Path(given[name]) for name in ("hf", "key_file", "log_file")}
        routing = given["routing"]
        if routing is not None:
            routing = RoutingShape(**{**routing, "moe_layers": tuple(routing["moe_layers"])})
        return CollectorSettings(
            **{**given, **paths, "eos_ids": tuple(given["eos_ids"]), "routing": routing}
        )


def request_to_json(request: GroupRequest) -> Json:
    prompt = request.prompt
    return {
        "serial": request.serial,
        "step": request.step,
        "prompt": {"id": prompt.id, "token_ids": prompt.token_ids, "payload": prompt.payload},
        "seeds": request.seeds,
        "sampling": asdict(request.sampling),
    }


def request_from_json(given: Json) -> GroupRequest:
    prompt = given["prompt"]
    return GroupRequest(
        serial=given["serial"],
        step=given["step"],
        prompt=Prompt(prompt["id"], tuple(prompt["token_ids"]), prompt["payload"]),
        seeds=tuple(given["seeds"]),
        sampling=Sampling(**given["sampling"]),
    )


def member_from_json(given: Json) -> Member:
    return Member(**given)


def error_to_json(error: BaseException) -> Json:
    if isinstance(error, ConfigError):
        return {"problems": [[p.key, p.found, p.accepted] for p in error.problems]}
    kind = type(error).__name__
    if kind not in _ERRORS:
        return {"kind": "RunError", "text": f"the collector failed: {kind}: {error}"}
    return {"kind": kind, "text": str(error)}


def error_from_json(given: Json) -> MegarlError:
    if "problems" in given:
        return ConfigError([Problem(*problem) for problem in given["problems"]])
    return _ERRORS[given["kind"]](given["text"])


def outcome_to_frame(outcome: GroupOutcome) -> tuple[Json, list[Array]]:
    samples = outcome.samples
    about = {
        "serial": outcome.serial,
        "failed": outcome.failed,
        "discarded": outcome.discarded,
        "unscored": outcome.unscored,
        "attempts": outcome.attempts,
        "tokens": outcome.tokens,
        "samples": [
            [
                s.length,
                s.correct,
                s.truncated,
                [[v.version, v.start, v.end, v.server] for v in s.version_spans],
                -1 if s.step_ends is None else len(s.step_ends),
                s.routing is not None,
            ]
            for s in samples
        ],
    }
    if not samples:
        return about, []
    arrays: list[Array] = [
        np.concatenate([s.tokens for s in samples]),
        np.concatenate([s.mask for s in samples]),
        np.concatenate([s.rollout_logprobs for s in samples]),
        np.stack([s.rewards for s in samples]),
    ]
    for s in samples:
        arrays += [a for a in (s.step_rewards, s.step_ends, s.routing) if a is not None]
    return about, arrays


def outcome_from_frame(about: Json, arrays: Sequence[Array], request: GroupRequest) -> GroupOutcome:
    return GroupOutcome(
        serial=request.serial,
        samples=_samples(about["samples"], arrays, request),
        failed=about["failed"],
        discarded=about["discarded"],
        unscored=about["unscored"],
        attempts=about["attempts"],
        tokens=about["tokens"],
    )


def _samples(
    described: Sequence[Any], arrays: Sequence[Array], request: GroupRequest
) -> tuple[Sample, ...]:
    if not described:
        return ()
    tokens, mask, logprobs, rewards = arrays[:4]
    more = iter(arrays[4:])
    ends = accumulate(length for length, *_ in described)
    samples = []
    for index, (end, about) in enumerate(zip(ends, described, strict=True)):
        length, correct, truncated, spans, steps, routed = about
        part = slice(end - length, end)
        samples.append(
            Sample(
                prompt_id=request.prompt.id,
                group=request.serial,
                index=index,
                tokens=tokens[part],
                mask=mask[part],
                rollout_logprobs=logprobs[part],
                rewards=rewards[index],
                correct=correct,
                truncated=truncated,
                version_spans=tuple(VersionSpan(*span) for span in spans),
                step_rewards=next(more) if steps >= 0 else None,
                step_ends=next(more) if steps >= 0 else None,
                routing=next(more) if routed else None,
                serial=request.serial,
            )
        )
    return tuple(samples)
