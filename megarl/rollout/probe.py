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
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from megarl.errors import ServerError
from megarl.rollout.control import new_session
from megarl.rollout.features import version_of

log = logging.getLogger(__name__)

_INFO_S = 10.0


@dataclass(frozen=True)
class Identity:
    """`mark` tells one start of a process from another; empty where the server cannot say."""

    version: str  # like "sglang 0.5.23"
    mark: str
    weights: int | None  # version, where it is a number
    progress: str  # another one whenever the server has generated tokens, for a time

    def same_process(self, later: "Identity") -> bool:
        """Whether `later` can be of the same process. Without a mark a version of weights that went
        back gives it away: nobody but a trainer moves it, and forward."""
        if self.mark or later.mark:
            return self.mark == later.mark
        return self.weights is None or later.weights is None or later.weights >= self.weights


class Probe:
    """One server. Calls block; use it from a thread that runs no event loop."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._progress: str | None = None  # when last asked

    def check(self, timeout_s: float, *, token: bool = False) -> Identity:
        """Who answers, once it has shown within `timeout_s` that it does work; `token`: by one that
        was generated for us. Tokens that it generated for others since the last check show the
        same. Raises ServerError."""
        before = self._progress
        try:
            asyncio.run(self._check(timeout_s, token))
        except ServerError:
            found = self.identity(timeout_s)
            if before is None or found.progress == before:
                raise
            log.info("%s is busy: it generates, and has not got to a probe", self.url)
            return found
        return self.identity(timeout_s)

    def identity(self, timeout_s: float = _INFO_S) -> Identity:
        """Raises ServerError."""
        found = asyncio.run(self._identity(min(timeout_s, _INFO_S)))
        self._progress = found.progress
        return found

    async def _check(self, timeout_s: float, token: bool) -> None:
        await self._ask("GET", "/health_generate", None, timeout_s)
        if not token:
            return
        rid = f"probe-{uuid.uuid4().hex}"
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        body = {"rid": rid, "input_ids": [0], "sampling_params": sampling}
        try:
            reply = _object(await self._ask("POST", "/generate", body, timeout_s))
        except ServerError:
            await self._abort(rid)
            raise
        if not isinstance(reply.get("output_ids"), list):
            raise ServerError(f"{self.url}: /generate: no output_ids in {str(reply)[:200]}")

    async def _identity(self, timeout_s: float) -> Identity:
        info = _object(await self._ask("GET", "/server_info", None, timeout_s))
        model = _object(await self._ask("GET", "/model_info", None, timeout_s))
        weights, started = str(model.get("weight_version")), info.get("boot")
        states = info.get("internal_states") or []
        return Identity(
            version=version_of(info),
            mark=json.dumps(started or info.get("startup_time") or "", sort_keys=True).strip('"'),
            weights=int(weights) if weights.isdecimal() else None,
            progress=str([info.get("steps"), *(s.get("last_gen_throughput") for s in states)]),
        )

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
            raise ServerError(f"{self.url}: {path}: HTTP {response.status} {text[:300]}".rstrip())
        return text


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"found {text[:100]!r}; expected: a JSON object")
    return found
