"""One group, from its request to whole responses, whatever servers do meanwhile.

1. All unfinished samples of a group are one request to one server.
2. A response that was stopped half-way (an ``abort``: a recall, a pause for new weights) goes on
   from its last token with what is left of its budget, or starts anew with its own seed, or ends
   its group, as `Rules.partial` says. With an end token, or at the end of its budget, it is whole:
   a server that samples the last token of a response while it is told to abort says "abort".
3. A continued response is the concatenation of its parts: tokens, log-probs, version spans shifted
   by the tokens before, and one row of routing for every token but the last, as servers tell it
   (docs/routing-replay.md: not all of them as it was when that token was first fed).
4. Whatever is whole is kept. A request that fails costs only what was not known of it, and is made
   again elsewhere, `Rules.max_attempts` times in all. What no server took (no connection, busy,
   other weights) is no attempt; a group that nobody has taken for `Rules.patience_s`, however often
   it was offered, has failed, whatever becomes of others. A refusal (4xx) ends the group.
5. An abort that brings nothing is no failure; after `_FRUITLESS` in a row the group has failed.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megarl.errors import ServerError
from megarl.rollout.client import Answer, Ask, Failure, Refusal, new_rids
from megarl.rollout.pool import Pool, Wish, Withdrawn
from megarl.types import (
    Completion,
    Finish,
    GroupRequest,
    Member,
    RoutingShape,
    VersionSpan,
)

Partial = Literal["continue", "restart", "discard"]

_FRUITLESS = 20
_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.1, 5.0


@dataclass(frozen=True)
class Rules:
    """What is done with parts and with failures. `eos_ids`: the tokens that end a response."""

    partial: Partial
    max_attempts: int
    routing: RoutingShape | None = None
    patience_s: float = 600.0
    eos_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sampled:
    """`completions`: one for every seed, or none. The rest is that of `GroupOutcome`."""

    completions: tuple[Completion, ...] = ()
    failed: str = ""
    discarded: bool = False
    attempts: int = 1
    tokens: int = 0


async def sample_group(
    request: GroupRequest, pool: Pool, rules: Rules, *, patience_s: float | None = None
) -> Sampled:
    """`patience_s`: it is urgent, asked before other groups and also while these are recalled, and
    fails when there is no server for so long.
    """
    group = _Group(request, rules, urgent=patience_s is not None)
    while group.unfinished and not group.ended:
        try:
            async with pool.lease(group.wish(), patience_s) as lease:
                outcome = await lease.ask(group.asks(), request.sampling, rules.routing)
        except ServerError as error:
            group.failed = str(error)
            break
        where = lease.member
        group.troubled = isinstance(outcome, Failure)
        if not (isinstance(outcome, Failure) and not outcome.taken):
            group.untaken, group.untaken_since = 0, None
        if isinstance(outcome, Withdrawn):
            group.withdrawn += not lease.recalled
        elif isinstance(outcome, Refusal):
            group.failed = f"{where.name} ({where.url}) refused it: {outcome.reason}"
        elif isinstance(outcome, Failure):
            group.home = None
            if outcome.taken:
                group.failure(where, outcome.reason)
            else:
                group.not_taken(where, outcome.reason)
        else:
            group.take(outcome, where, recalled=lease.recalled)
            if outcome.wrong:
                group.failure(where, outcome.wrong)
        if group.troubled and not group.ended:
            await _pause(group.failures + group.fruitless + group.untaken)
    return group.result()


async def _pause(times: int) -> None:
    longest = min(_BACK_OFF_S * 2 ** min(times, 10), _LONGEST_BACK_OFF_S)
    await asyncio.sleep(longest * random.uniform(0.5, 1.0))


@dataclass(eq=False)
class _Response:
    """A sample on its way."""

    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    rows: list[NDArray[Any]] = field(default_factory=list)
    request_id: str = ""
    finish: Finish = "abort"

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def append(self, part: Completion, server: str, finish: Finish) -> None:
        before = len(self.tokens)
        self.tokens += part.token_ids.tolist()
        self.logprobs.append(part.logprobs)
        for span in part.version_spans:
            self.spans = _with_span(
                self.spans,
                VersionSpan(span.version, span.start + before, span.end + before, server),
            )
        if part.routing is not None:
            self.rows.append(part.routing)
        self.request_id, self.finish = part.request_id, finish

    def start_anew(self) -> None:
        self.tokens, self.logprobs, self.spans, self.rows = [], [], [], []
        self.finish = "abort"

    def whole(self) -> Completion:
        rows = self.rows
        return Completion(
            request_id=self.request_id,
            token_ids=np.array(self.tokens, np.int32),
            logprobs=_joined(self.logprobs),
            finish=self.finish,
            version_spans=tuple(self.spans),
            routing=_joined(rows) if rows else None,
        )


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _with_span(spans: list[VersionSpan], span: VersionSpan) -> list[VersionSpan]:
    """Without empty ones, and with what one server sampled under one version in one piece."""
    if span.start == span.end:
        return spans
    last = spans[-1] if spans else None
    if last is not None and (last.version, last.server) == (span.version, span.server):
        return [*spans[:-1], replace(last, end=span.end)]
    return [*spans, span]


class _Group:
    """What is known of a group."""

    def __init__(self, request: GroupRequest, rules: Rules, *, urgent: bool) -> None:
        self.request, self.rules, self.urgent = request, rules, urgent
        self.prompt = list(request.prompt.token_ids)
        self.responses = [_Response(seed) for seed in request.seeds]
        self.asked: list[_Response] = []
        self.home: Member | None = None
        self.avoid: frozenset[Member] = frozenset()
        self.failed, self.discarded = "", False
        self.troubled = False  # its last request brought nothing that was hoped for
        self.failures = self.withdrawn = self.fruitless = self.untaken = self.tokens = 0
        self.untaken_since: float | None = None  # nobody has taken it since then

    @property
    def unfinished(self) -> list[_Response]:
        return [r for r in self.responses if r.finish == "abort"]

    @property
    def ended(self) -> bool:
        return bool(self.failed) or self.discarded

    def budget(self, response: _Response) -> int:
        return self.request.sampling.max_new_tokens - len(response.tokens)

    def wish(self) -> Wish:
        self.asked = self.unfinished
        tokens = sum(len(self.prompt) + len(r.tokens) + self.budget(r) for r in self.asked)
        order = self.request.serial
        return Wish(order, len(self.asked), tokens, self.home, self.avoid, self.urgent)

    def asks(self) -> list[Ask]:
        return [
            Ask(rid, [*self.prompt, *r.tokens], self.budget(r), r.seed, r.num_rows)
            for rid, r in zip(new_rids(len(self.asked)), self.asked, strict=True)
        ]

    def take(self, answer: Answer, server: Member, *, recalled: bool) -> None:
        """Everything of an answer that can be kept."""
        self.home = server
        progress, aborts = False, 0
        for response, part in zip(self.asked, answer.parts, strict=True):
            if part is None:
                continue
            count = len(part.token_ids)
            self.tokens += count
            finish = self._finish(part, response)
            if finish != "abort" or self.rules.partial == "continue":
                progress |= count > 0
                response.append(part, server.name, finish)
            elif self.rules.partial == "discard" and count:
                self.discarded = True
            if finish == "abort" and self._at_its_end(response):
                response.start_anew()  # the routing of its last tokens will never be known
            aborts += finish == "abort"
        self.fruitless = 0 if progress or recalled or not aborts else self.fruitless + 1
        self.troubled = bool(answer.wrong or self.fruitless)
        if self.fruitless == _FRUITLESS:
            self.failed = (
                f"{server.name} ({server.url}): found {aborts} of {len(self.responses)} "
                f"responses aborted, {_FRUITLESS} times in a row without a token to keep"
            )

    def _finish(self, part: Completion, response: _Response) -> Finish:
        """What was stopped at its very end is whole, if its routing is."""
        if part.finish != "abort" or (self.rules.routing is not None and part.routing is None):
            return part.finish
        if self._ended_by(part.token_ids):
            return "stop"
        return "length" if len(part.token_ids) == self.budget(response) else "abort"

    def _at_its_end(self, response: _Response) -> bool:
        return not self.budget(response) or self._ended_by(response.tokens)

    def _ended_by(self, tokens: Sequence[int] | NDArray[np.int32]) -> bool:
        found = len(tokens) > 0 and int(tokens[-1]) in self.rules.eos_ids
        return found and not self.request.sampling.ignore_eos

    def failure(self, server: Member, reason: str) -> None:
        self.failures += 1
        self.avoid |= {server}
        if self.failures >= self.rules.max_attempts:
            times = "once" if self.failures == 1 else f"{self.failures} times"
            self.failed = f"failed {times}, the last time at {server.name} ({server.url}): {reason}"

    def not_taken(self, server: Member, reason: str) -> None:
        """Part of the time it may have waited for room: it has its number of offers, too."""
        now = time.monotonic()
        self.untaken += 1
        self.untaken_since = self.untaken_since or now
        seconds = now - self.untaken_since
        if seconds > self.rules.patience_s and self.untaken >= self.rules.max_attempts:
            which = f"the last one {server.name} ({server.url}): {reason}"
            self.failed = f"no server has taken it for {seconds:.0f} s, {which}"

    def result(self) -> Sampled:
        whole: Sequence[Completion] = ()
        if not self.ended:
            whole = [r.whole() for r in self.responses]
        attempts = 1 + min(self.failures, self.rules.max_attempts - 1) + self.withdrawn
        return Sampled(tuple(whole), self.failed, self.discarded, attempts, self.tokens)
