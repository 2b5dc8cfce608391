"""The one client of rollout servers: SGLang's HTTP protocol, whoever answers.

What a caller may rely on:

1. A call ends by its deadline, with validated results or with a ServerError that names the server,
   the request id, what was found and what was expected.
2. A request that may still be running when its connection broke is aborted before it is sent again
   under a new id, at most `RETRIES` times, within the same deadline. 4xx is never sent again.
3. No answer is repaired: as many log-probs as tokens, all finite, of those very tokens; a known
   finish reason; version spans that cover the response without a gap. Aborted responses are
   returned as such.
4. The key goes with every call. Proxies from the environment are not used.
"""

import asyncio
import base64
import binascii
import json
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from megarl.errors import ServerError
from megarl.ops.routing_codec import CodecError, narrow
from megarl.rollout.control import ServerControl, new_session
from megarl.types import Completion, Finish, RoutingShape, Sampling, VersionSpan

__all__ = ["RolloutClient", "Sampling", "ServerControl"]
log = logging.getLogger(__name__)

RETRIES = 2
_BACK_OFF_S = (0.2, 0.6)
_ABORT_TIMEOUT_S = 2.0
_LOGPROB_SLACK = 1e-3  # rounding may lift the log-prob of a certain token above 0
_FINISHES: tuple[Finish, ...] = ("stop", "length", "abort")


class RolloutClient:
    """One server. Belongs to the event loop in which it is first used."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        """`timeout_s` bounds one `generate_group`, retries included."""
        self.url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"Authorization": f"Bearer {key}"}
        self._session: aiohttp.ClientSession | None = None

    async def generate_group(
        self,
        prompt_ids: Sequence[int],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        routing: RoutingShape | None = None,
    ) -> list[Completion]:
        """`n` responses to one prompt in one request, in the order of `seeds`. Raises ServerError.

        `routing`: ask for routed experts too, of a model of this shape.
        """
        assert len(seeds) == n, (len(seeds), n)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        for attempt in range(RETRIES + 1):
            rids = [f"{uuid.uuid4().hex}-{i}" for i in range(n)]
            body = _generate_body(prompt_ids, sampling, seeds, rids, routing is not None)
            try:
                status, text = await self._request("POST", "/generate", body, deadline)
            except TimeoutError as error:
                await self._abort(rids)
                raise self._error(
                    rids, f"no answer within {self._timeout_s:g} s", "a response"
                ) from error
            except aiohttp.ClientConnectorError as error:
                found, orphans = f"no connection ({error})", False
            except aiohttp.ClientError as error:
                found, orphans = f"the connection broke ({_reason(error)})", True
            else:
                if status == 200:
                    return self._completions(text, rids, len(prompt_ids), sampling, routing)
                found, orphans = f"HTTP {status}: {text[:300]}", False
                if status < 500:
                    raise self._error(rids, found, "HTTP 200")
            if orphans:
                await self._abort(rids)
            pause = _BACK_OFF_S[min(attempt, len(_BACK_OFF_S) - 1)]
            if attempt == RETRIES or _left(deadline) <= pause:
                raise self._error(rids, f"{found}, {attempt + 1} times", "HTTP 200")
            log.warning("%s: %s; sending again", self.url, found)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    async def health(self, timeout_s: float = 30.0) -> None:
        """Makes the server generate a token. Raises ServerError if it cannot."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            status, text = await self._request("GET", "/health_generate", None, deadline)
        except (TimeoutError, aiohttp.ClientError) as error:
            raise ServerError(f"{self.url}: not healthy: {_reason(error)}") from error
        if status != 200:
            raise ServerError(f"{self.url}: not healthy: HTTP {status} {text[:300]}")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float
    ) -> tuple[int, str]:
        if self._session is None:
            self._session = new_session(self._headers)
        timeout = aiohttp.ClientTimeout(total=max(_left(deadline), 0.001))
        async with self._session.request(
            method, self.url + path, json=body, timeout=timeout
        ) as response:
            return response.status, await response.text()

    async def _abort(self, rids: Sequence[str]) -> None:
        """Frees the server of requests nobody waits for any more, if it still listens."""
        deadline = asyncio.get_running_loop().time() + _ABORT_TIMEOUT_S
        calls = [self._request("POST", "/abort_request", {"rid": rid}, deadline) for rid in rids]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failed = [o for o in outcomes if isinstance(o, Exception)]
        if failed:
            log.warning("%s: %d of %d aborts failed", self.url, len(failed), len(rids))

    def _completions(
        self,
        text: str,
        rids: Sequence[str],
        prompt_length: int,
        sampling: Sampling,
        routing: RoutingShape | None,
    ) -> list[Completion]:
        try:
            replies = json.loads(text)
        except ValueError as error:
            raise self._error(rids, f"{text[:100]!r}", "JSON") from error
        if not isinstance(replies, list) or len(replies) != len(rids):
            count = len(replies) if isinstance(replies, list) else 1
            raise self._error(rids, f"{count} responses", f"{len(rids)} responses")
        return [
            self._completion(reply, rid, prompt_length, sampling, routing)
            for reply, rid in zip(replies, rids, strict=True)
        ]

    def _completion(
        self,
        reply: Any,
        rid: str,
        prompt_length: int,
        sampling: Sampling,
        routing: RoutingShape | None,
    ) -> Completion:
        try:
            return read_completion(reply, rid, prompt_length, sampling, routing)
        except _Mismatch as error:
            raise self._error([rid], error.found, error.expected) from error
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise self._error([rid], f"{error!r} in {str(reply)[:200]}", "a response") from error

    def _error(self, rids: Sequence[str], found: str, expected: str) -> ServerError:
        return ServerError(f"{self.url}: request {rids[0]}: found {found}; expected: {expected}")


class _Mismatch(Exception):
    def __init__(self, found: object, expected: str) -> None:
        super().__init__(found, expected)
        self.found, self.expected = str(found), expected


def read_completion(
    reply: Mapping[str, Any],
    rid: str,
    prompt_length: int,
    sampling: Sampling,
    routing: RoutingShape | None,
) -> Completion:
    """Checks one reply and takes it over. Raises _Mismatch, or what indexing wrong JSON raises."""
    tokens, meta = reply["output_ids"], reply["meta_info"]
    count = len(tokens)
    finish = meta["finish_reason"]["type"]
    _expect(meta["id"] == rid, f"an answer to {meta['id']!r}", f"one to {rid!r}")
    _expect(finish in _FINISHES, f"finish reason {finish!r}", " or ".join(_FINISHES))
    _expect(all(type(t) is int for t in tokens), f"output_ids {tokens!r:.80}", "integers")
    nothing: list[Any] | None = [] if finish == "abort" and count == 0 else None
    entries = meta.get("output_token_logprobs", nothing)
    _expect(isinstance(entries, list), "no output_token_logprobs", f"{count} log-probs")
    _expect(len(entries) == count, f"{len(entries)} log-probs", f"{count}, one a token")
    values = [entry[0] for entry in entries]
    good = all(isinstance(v, float | int) and math.isfinite(v) for v in values)
    _expect(
        good and all(v <= _LOGPROB_SLACK for v in values), values, "finite log-probs, 0 or less"
    )
    _expect([e[1] for e in entries] == tokens, "log-probs of other tokens", "those of output_ids")
    _check_count(count, finish, sampling)
    if finish == "abort":  # nobody keeps it: it was perhaps never routed
        routing = None
    return Completion(
        request_id=rid,
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array(values, np.float32),
        finish=finish,
        version_spans=_spans(meta, count),
        routing=None if routing is None else _routing(meta, prompt_length + count, routing),
    )


def _check_count(count: int, finish: str, sampling: Sampling) -> None:
    limit = sampling.max_new_tokens
    _expect(count <= limit, f"{count} tokens", f"at most {limit}")
    if finish == "length":
        _expect(count == limit, f"a stop for length after {count} tokens", f"one after {limit}")
    if finish == "stop":
        _expect(count > 0, "a stop without an end token", "at least one token")


def _spans(meta: Mapping[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """As the server gives them; one for all where it gives a single version only."""
    raw = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": count}
    ]
    spans = []
    for entry in raw:
        version = entry["version"]
        _expect(
            isinstance(version, str) and version.isdecimal(),
            f"weight version {version!r}",
            "a decimal number, as a weight push sets it",
        )
        spans.append(VersionSpan(int(version), entry["start"], entry["end"]))
    bounds = [0, *(span.end for span in spans)]
    covered = [span.start for span in spans] == bounds[:-1] and bounds[-1] == count
    _expect(covered and bounds == sorted(bounds), f"version spans {raw}", f"spans over 0..{count}")
    return tuple(spans)


def _routing(meta: Mapping[str, Any], length: int, shape: RoutingShape) -> NDArray[Any]:
    """u8 | u16 [length - 1, MoE layers, top-k]: the last token was never routed. Servers report all
    layers, with anything for dense ones (SGLang), or those with experts (the embedded server).
    """
    encoded: Any = meta.get("routed_experts")
    _expect(isinstance(encoded, str), "no routed_experts", "routed experts in base64")
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise _Mismatch(
            f"routed experts that do not decode ({error})", "base64 of int32"
        ) from error
    rows, every, some = length - 1, len(shape.moe_layers), shape.num_moe_layers
    layers = flat.size / (rows * shape.topk)
    _expect(
        layers in (some, every),
        f"{flat.size} routed experts, those of {layers:g} layers",
        f"{(rows, some, shape.topk)}, or of all {every} layers",
    )
    ids = flat.reshape(rows, int(layers), shape.topk).astype(np.int32, copy=False)
    if layers != some:
        ids = ids[:, list(shape.moe_layers)]
    try:
        return narrow(ids, shape.experts)
    except CodecError as error:
        raise _Mismatch(f"routed experts that cannot be ({error})", "a router's choice") from error


def _expect(condition: bool, found: object, expected: str) -> None:
    if not condition:
        raise _Mismatch(found, expected)


def _generate_body(
    prompt_ids: Sequence[int],
    sampling: Sampling,
    seeds: Sequence[int],
    rids: Sequence[str],
    routing: bool,
) -> dict[str, Any]:
    shared = {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        # said outright, so that no default of the server or the model reshapes the distribution
        # whose log-probs come back
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    body: dict[str, Any] = {
        "input_ids": [[int(t) for t in prompt_ids]] * len(rids),
        "sampling_params": [shared | {"sampling_seed": int(seed)} for seed in seeds],
        "rid": list(rids),
        "return_logprob": True,
    }
    if routing:
        body["return_routed_experts"] = True
    return body


def _left(deadline: float) -> float:
    return deadline - asyncio.get_running_loop().time()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
