"""A rollout server as a weight push sees it: operations of `WeightSink.control` on SGLang's
endpoints."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from megarl.errors import ServerError
from megarl.rollout.features import Features, features_of


@dataclass(frozen=True)
class Call:
    """One request of an operation; `body` is made from the operation's payload."""

    path: str
    body: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    json_reply: bool = True


def _given(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    return payload


def _nothing(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


_SESSION = ("/begin_weight_update", "/end_weight_update")

OPERATIONS: Mapping[str, tuple[Call, ...]] = {
    "begin": (
        Call("/pause_generation", lambda p: {"mode": p.get("mode", "retract")}),
        Call("/begin_weight_update", _nothing),
    ),
    "join_group": (Call("/init_weights_update_group", _given),),
    "leave_group": (Call("/destroy_weights_update_group", _given),),
    "receive": (
        Call(
            "/update_weights_from_distributed",
            lambda p: {"load_format": "flattened_bucket", "flush_cache": False, **p},
        ),
    ),
    "load_path": (Call("/update_weights_from_disk", _given),),
    "digest": (Call("/weights_checker", lambda p: {"action": "digest", "selector": "target"}),),
    "commit": (
        Call("/end_weight_update", _nothing),
        Call("/flush_cache", _nothing, json_reply=False),
        Call(
            "/update_weight_version",
            lambda p: {"new_version": str(p["version"]), "abort_all_requests": False},
        ),
        Call("/continue_generation", _nothing),
    ),
}


def calls_of(op: str, features: Features) -> tuple[Call, ...]:
    """What an operation is on a server with these features."""
    calls = OPERATIONS[op]
    if features.weight_session:
        return calls
    return tuple(call for call in calls if call.path not in _SESSION)


class ServerControl:
    """A WeightSink. Calls block; use it from a thread that runs no event loop."""

    def __init__(
        self, url: str, key: str, name: str | None = None, *, ranks: int = 1, version: str = ""
    ) -> None:
        """`ranks`: the server's tensor-parallel ranks, each a member of a weight group. `version`
        of its software, as `Member.version` has it; empty: as the newest that is supported.
        """
        self.url, self.ranks = url.rstrip("/"), ranks
        self._features = features_of(version) if version else Features()
        self.name = name or self.url
        self._headers = {"Authorization": f"Bearer {key}"}

    def control(self, op: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Runs the operation's calls in order; returns the last JSON reply.

        Payloads: `begin` {"mode": of the pause}; `join_group`, `leave_group`, `receive`,
        `load_path` carry SGLang's own fields; `commit` {"version": int}; `digest` nothing. Raises
        ServerError naming the server and the call that was refused, failed or did not end within
        `timeout_s` (of all calls together).
        """
        calls = calls_of(op, self._features)
        reply = asyncio.run(self._run(op, calls, payload, timeout_s))
        return {"digests": self._digests(reply)} if op == "digest" else reply

    def _digests(self, reply: Mapping[str, Any]) -> dict[str, str]:
        """The embedded server's own, or those of SGLang with our plugin: a record of every rank.
        All ranks take whole tensors and must have taken the same."""
        if isinstance(reply.get("digests"), dict):
            return reply["digests"]
        records = [rank.get("checksums") for rank in reply.get("ranks", ())]
        if not records or not records[0]:
            raise ServerError(
                f"{self.name}: found no weight digests in the reply; expected: one for every "
                "tensor (an SGLang server needs the plugin in megarl/sync/sglang_plugin)"
            )
        if any(record != records[0] for record in records):
            raise ServerError(f"{self.name}: its {len(records)} ranks received different weights")
        digests: dict[str, str] = records[0]
        return digests

    async def _run(
        self, op: str, calls: tuple[Call, ...], payload: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        at = calls[0]
        try:
            async with asyncio.timeout(timeout_s), new_session(self._headers) as session:
                for at in calls:
                    answer = await self._post(session, at, at.body(payload))
                    reply = answer or reply
        except TimeoutError as error:
            raise ServerError(
                f"{self.name}: {op}: {at.path} did not end within {timeout_s:g} s"
            ) from error
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self.name}: {op}: {at.path}: {reason}") from error
        return reply

    async def _post(
        self, session: aiohttp.ClientSession, call: Call, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        no_limit = aiohttp.ClientTimeout(total=None)
        async with session.post(self.url + call.path, json=body, timeout=no_limit) as response:
            status, text = response.status, await response.text()
        if status != 200:
            raise ServerError(f"{self.name}: {call.path}: HTTP {status}: {_message(text)}")
        if not call.json_reply:
            return {}
        try:
            reply = json.loads(text)
        except ValueError as error:
            raise ServerError(f"{self.name}: {call.path}: not JSON: {text[:200]!r}") from error
        if not isinstance(reply, dict) or reply.get("success") is False:
            raise ServerError(f"{self.name}: {call.path}: refused: {_message(text)}")
        return reply


def new_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """A session without a limit on connections, without proxies, that sends `headers`."""
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False)


def _message(text: str) -> str:
    """The server's own words, out of whatever shape it put them in."""
    try:
        body = json.loads(text)
    except ValueError:
        return text[:300]
    if isinstance(body, dict):
        error = body.get("error")
        inner = error.get("message") if isinstance(error, dict) else error
        return str(body.get("message") or inner or body)[:1000]
    return str(body)[:300]
