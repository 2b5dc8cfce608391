"""The one client of rollout servers: SGLang's HTTP protocol, whoever answers.

What a caller may rely on:

1. `generate` is one attempt of one request. It ends by its deadline and says what became of it: an
   answer, a failure of the server, or a refusal. Whether to ask again is the caller's business
   (`sampler.py`).
2. Request ids are of one attempt. What may still be running when the connection breaks, the
   deadline passes, the caller gives up, or a server (or what stands before it) says that it failed
   or is busy, is aborted by its id before the call ends, so that asking again never has a sample
   made twice.
3. No answer is repaired (`replies.py`).
4. The key goes with every call. Proxies from the environment are not used.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from megarl.rollout.replies import Answer, Ask, OtherWeights, first_row, read_answer
from megarl.types import RoutingShape, Sampling

__all__ = [
    "Answer",
    "Ask",
    "Failure",
    "Outcome",
    "Refusal",
    "RolloutClient",
    "new_rids",
    "request_body",
]
log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 2.0
_ABORTS_AT_ONCE = 32
_KEEP_ALIVE_S = 2.0  # servers close what is idle for longer (uvicorn: 5), just when we might use it
_READ_BYTES = 4 * 2**20
# Whatever else SGLang 0.5.21 to 0.5.23 knows that changes what is sampled, where it ends or what is
# told of it. A server may have defaults of its own (--preferred-sampling-params): null is none.
_NEUTRAL: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": None,
    "min_new_tokens": 0,
    "stop": None,
    "stop_token_ids": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "n": 1,
    "beam_width": None,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
}
_BUSY = (408, 429, 503)  # the request was not worked on, and nothing is wrong with it


@dataclass(frozen=True)
class Failure:
    """The server failed. ``taken``: it may have worked on the request. ``busy``: it said that it
    has no room for it; nothing else is wrong with it.
    """

    reason: str
    taken: bool
    busy: bool = False


@dataclass(frozen=True)
class Refusal:
    """4xx: the request itself is wrong, wherever it is sent."""

    reason: str


Outcome = Answer | Failure | Refusal


def new_rids(count: int) -> list[str]:
    """No id is the beginning of another: SGLang aborts all that begin with the one it is given."""
    attempt = uuid.uuid4().hex
    return [f"{attempt}-{i:05d}" for i in range(count)]


class RolloutClient:
    """One server. Belongs to the event loop in which it is first used."""

    can_abort = True  # so that what there is comes back

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        """`timeout_s` bounds one `generate`."""
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._aborting = asyncio.Semaphore(_ABORTS_AT_ONCE)

    async def generate(
        self,
        asks: Sequence[Ask],
        sampling: Sampling,
        routing: RoutingShape | None = None,
        least_version: int = 0,
    ) -> Outcome:
        """`sampling.max_new_tokens` is of whole responses; a request has every sequence's own
        budget. `routing`: ask for routed experts too, of a model of this shape. `least_version`:
        of the weights that the server has.
        """
        rids = [ask.rid for ask in asks]
        batch = self._batch(request_body(asks, sampling, routing is not None))
        body = orjson.dumps(batch, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            status, raw = await self._post("/generate", body, self._timeout_s)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return Failure(f"no connection ({_reason(error)})", taken=False)
        except TimeoutError:
            await self.abort(rids)
            return Failure(f"no answer within {self._timeout_s:g} s", taken=True)
        except (aiohttp.ClientError, OSError) as error:
            await self.abort(rids)
            return Failure(f"the connection broke ({_reason(error)})", taken=True)
        except asyncio.CancelledError:
            await self.abort(rids)
            raise
        if status == 200:
            try:
                return read_answer(self._replies(raw), asks, routing, least_version)
            except OtherWeights as error:
                return Failure(str(error), taken=False)
        said = f"HTTP {status}: {raw[:300].decode(errors='replace')}"
        busy = status in _BUSY
        if not 400 <= status < 500 or busy:  # some of it may run all the same
            await self.abort(rids)
        if busy or status >= 500:
            return Failure(said, taken=not busy, busy=busy)
        return Refusal(said)

    def _batch(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is sent of a body with lists of sequences, and so on."""
        return body

    def _replies(self, raw: bytes) -> bytes:
        """JSON of a list of replies, out of what has come."""
        return raw

    async def abort(self, rids: Sequence[str]) -> bool:
        """Frees the server of requests nobody waits for any more; whether it has heard of all."""
        done = 0

        async def abort(rid: str) -> None:
            nonlocal done
            async with self._aborting:
                body = orjson.dumps({"rid": rid})
                await self._post("/abort_request", body, _ABORT_TIMEOUT_S)
            done += 1

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await asyncio.gather(*(abort(rid) for rid in rids), return_exceptions=True)
        if done < len(rids):
            log.warning("%s: %d of %d aborts failed", self.url, len(rids) - done, len(rids))
        return done == len(rids)

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        if self._closed:
            raise aiohttp.ClientConnectionError("the client is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                headers=self._headers | {"Content-Type": "application/json"},
                read_bufsize=_READ_BYTES,
                trust_env=False,
            )
        timeout = aiohttp.ClientTimeout(
            total=max(timeout_s, 0.001), sock_connect=min(timeout_s, _CONNECT_TIMEOUT_S)
        )
        async with self._session.post(
            self.url + path, data=body, timeout=timeout, allow_redirects=False
        ) as response:
            # Not `response.read()`, whose result lives for as long as the response's cycles do.
            return response.status, await response.content.read()


def request_body(asks: Sequence[Ask], sampling: Sampling, routing: bool) -> Mapping[str, Any]:
    """What `/generate` is asked; `routing`: for routed experts, too."""
    shared = {
        "temperature": sampling.temperature,
        "ignore_eos": sampling.ignore_eos,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        **_NEUTRAL,
    }
    body: dict[str, Any] = {
        "input_ids": [ask.tokens for ask in asks],
        "sampling_params": [
            shared | {"max_new_tokens": ask.budget, "sampling_seed": ask.seed} for ask in asks
        ],
        "rid": [ask.rid for ask in asks],
        "return_logprob": True,
    }
    if routing:
        body["return_routed_experts"] = True
        if start := first_row(asks):
            body["routed_experts_start_len"] = start
    return body


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
