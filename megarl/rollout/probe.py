"""Questions to a server whose answers take work: is it alive, and is it still the same one?

SGLang's `/health_generate` submits a request for a token, and answers as soon as the scheduler has
put out anything at all, so that a busy server answers at once. A request of one's own, and the
embedded server's `/health_generate`, wait behind the others; `/server_info` tells whether these get
tokens meanwhile: steps (embedded), or a throughput that SGLang measures anew every few dozen steps.
While generation is paused SGLang does not answer: nobody asks then (`Hold`).
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from megarl.errors import ServerError
from megarl.rollout.client import new_rids, request_body
from megarl.rollout.control import new_session
from megarl.rollout.features import longest_of, mark_of, plugin_of, version_of, waits_of
from megarl.rollout.replies import Ask, OtherWeights, read_answer
from megarl.types import Sampling

log = logging.getLogger(__name__)

_INFO_S = 10.0


@dataclass(frozen=True)
class Identity:
    """`mark` tells one start of a process from another; empty where the server cannot say."""

    version: str  # like "sglang 0.5.23"
    mark: str
    weights: int | None  # version, where it is a number
    progress: str  # another one whenever the server has generated tokens, for a time
    ranks: int | None = None  # tensor-parallel, where the server says
    longest: int | None = None  # prompt and response together, where the server says
    plugin: str = ""  # version of ours in SGLang
    waits: bool = False  # for weights, and says so: until then it generates nothing

    def same_process(self, later: "Identity") -> bool:
        """Whether `later` can be of the same process. Without a mark another version of weights
        gives it away: nobody but a trainer moves it, and who is to compare knows what it pushed."""
        if self.mark or later.mark:
            return self.mark == later.mark
        return self.weights == later.weights


class WrongAnswerError(ServerError):
    """It answers, but not what a client could use: being busy does not excuse it."""


class _Missing(ServerError):
    """There is no such endpoint."""


class Probe:
    """One server. Calls block; use it from a thread that runs no event loop."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._progress: str | None = None  # when last asked

    def check(self, timeout_s: float, *, token_timeout_s: float | None = None) -> Identity:
        """Who answers, once it has shown within `timeout_s` that it does work, and then, if
        `token_timeout_s` is given, within that by a token for us, told as a client needs it. Tokens
        that it generated for others since the last check show that it works, too. A server whose
        update of weights was left half-way lacks nothing but a push. Raises ServerError."""
        before = self._progress
        try:
            asyncio.run(self._check(timeout_s, token_timeout_s))
        except WrongAnswerError:
            raise
        except ServerError:
            found = self.identity(timeout_s)
            busy = before is not None and found.progress != before
            if not busy and not found.waits:
                raise
            log.info("%s %s", self.url, "is busy" if busy else "waits for weights")
            return found
        return self.identity(timeout_s)

    def resume(self) -> None:
        """Lets a server generate that a trainer has left paused; it may refuse."""
        try:
            asyncio.run(self._ask("POST", "/continue_generation", {}, 2.0))
        except ServerError as error:
            log.debug("%s", error)

    def identity(self, timeout_s: float = _INFO_S) -> Identity:
        """Raises ServerError."""
        found = asyncio.run(self._identity(min(timeout_s, _INFO_S)))
        self._progress = found.progress
        return found

    async def _check(self, timeout_s: float, token_timeout_s: float | None) -> None:
        await self._ask("GET", "/health_generate", None, timeout_s)
        if token_timeout_s is None:
            return
        (rid,) = new_rids(1)
        ask = Ask(rid, [0], budget=1, seed=0)
        body = request_body([ask], Sampling(temperature=1.0, max_new_tokens=1), routing=False)
        try:
            reply = await self._ask("POST", "/generate", body, token_timeout_s)
        except ServerError:
            await self._abort(rid)
            raise
        try:
            wrong = read_answer(reply.encode(), [ask], None).wrong
        except OtherWeights:  # whoever compares identities knows what that means
            wrong = ""
        if wrong:
            raise WrongAnswerError(f"{self.url}: /generate: {wrong}")

    async def _identity(self, timeout_s: float) -> Identity:
        info = await self._told("server_info", timeout_s)
        model = await self._told("model_info", timeout_s)
        ranks = info.get("tp_size")
        weights = str(model.get("weight_version"))
        states = info.get("internal_states") or []
        return Identity(
            version=version_of(info),
            mark=mark_of(info),
            weights=int(weights) if weights.isdecimal() else None,
            ranks=ranks if isinstance(ranks, int) else None,
            longest=longest_of(info),
            plugin=plugin_of(info),
            waits=waits_of(info),
            progress=str([info.get("steps"), *(s.get("last_gen_throughput") for s in states)]),
        )

    async def _told(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Under the name that newer versions have for it, or the older one."""
        try:
            return _object(await self._ask("GET", f"/{what}", None, timeout_s))
        except _Missing:
            return _object(await self._ask("GET", f"/get_{what}", None, timeout_s))

    async def _abort(self, rid: str) -> None:
        try:
            await self._ask("POST", "/abort_request", {"rid": rid}, 1.0)
        except ServerError as error:
            log.info("%s", error)

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> str:
        """The text of an answer with status 200."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                new_session(self._headers) as session,
                session.request(method, self.url + path, json=body, timeout=timeout) as response,
            ):
                text = await response.text()
        except TimeoutError as error:
            found = f"no answer within {timeout_s:g} s"
            raise ServerError(f"{self.url}: {path}: {found}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self.url}: {path}: {reason}") from error
        if response.status != 200:
            kind = _Missing if response.status == 404 else ServerError
            raise kind(f"{self.url}: {path}: HTTP {response.status} {text[:300]}".rstrip())
        return text


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"found {text[:100]!r}; expected: a JSON object")
    return found
