"""A rollout server as a weight push sees it: a `WeightSink` (what it asks: operations.py)."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from megarl.errors import NoAnswerError, ServerError
from megarl.rollout.features import PLUGIN_VERSION, features_of, mark_of
from megarl.rollout.operations import INFO, OPERATIONS, Call, named, of_all, opens

_RETRY_S = 0.1


class ServerControl:
    """A WeightSink. Calls block; use it from a thread that runs no event loop."""

    def __init__(
        self,
        url: str,
        key: str,
        name: str | None = None,
        *,
        ranks: int = 1,
        boot: str = "",
        version: str = "",
        released: bool = False,
    ) -> None:
        """`ranks`: the server's tensor-parallel ranks, each a member of a weight group. `version`
        of its software, as `Member.version` has it; empty: it has nothing to prove.
        `released`: its memory is (operation `release`), and `commit` is to resume the rest of it.
        """
        self.url, self.ranks, self.boot = url.rstrip("/"), ranks, boot
        self.name = name or self.url
        self.proves = bool(version) and features_of(version).plugin
        self._released = released
        self._open: bool | None = None  # the update that `begin` opens; None: who knows
        self._mark = ""  # of the process that `begin` paused
        self._headers = {"Authorization": f"Bearer {key}"}

    @property
    def local_address(self) -> str:
        """This machine's, as the server reaches it."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        kind = socket.SOCK_DGRAM
        family, _, protocol, _, target = socket.getaddrinfo(host, port, type=kind)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket: sends nothing, only looks up the route
            return str(probe.getsockname()[0])

    def control(self, op: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Runs the operation's calls in order; returns the last JSON reply.

        Payloads: `join_group`, `leave_group`, `receive`, `receive_shared`, `receive_tensors`,
        `load_path` carry the endpoint's own fields; `begin` {"mode": pause mode, "session": bool},
        `commit` that and {"version": int}; all others nothing.
        Raises ServerError naming the server and the call that was refused, failed or did not end
        within `timeout_s` (of all calls together), and for a `commit` to another process than that
        which `begin` paused: it has other weights.
        """
        calls = OPERATIONS[op]
        if op in ("snapshot", "compare", "commit"):
            payload = {**payload, "open": self._open, "released": self._released}
        if op == "begin":
            self._mark = mark_of(asyncio.run(self._run(op, (INFO,), {}, timeout_s)))
        elif op == "commit":
            still = replace(INFO, wrong=self._not_paused_by_us)
            calls = (still, *calls, replace(INFO, wrong=self._another))
        reply = asyncio.run(self._run(op, calls, payload, timeout_s))
        if op == "begin":
            self._open = opens(payload)
        elif op in ("compare", "commit"):
            self._open = False if op == "compare" else None
        if op == "held":
            return self._held(reply)
        return self._digests(reply) if op == "digest" else reply

    def _another(self, info: Mapping[str, Any]) -> str:
        if not self._mark or mark_of(info) == self._mark:
            return ""
        return "another process answers at its address than the one that got the weights"

    def _not_paused_by_us(self, info: Mapping[str, Any]) -> str:
        if another := self._another(info):
            return another
        resumed = bool(self._mark) and info.get("paused", "not told") is None
        return "somebody let it go on in the middle of the push" if resumed else ""

    def _held(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """As `_digests`, but of SGLang what all ranks hold alike and not all have dropped."""
        if isinstance(reply.get("digests"), dict):
            return self._digests(reply)
        told = self._ranks(reply)
        dropped = of_all(told, "megarl:dropped")
        first, *others = (named(rank) for rank in told)
        held = {n: d for n, d in first.items() if all(other.get(n) == d for other in others)}
        digests = {n: d for n, d in held.items() if n not in dropped}
        return {"digests": digests, "digest_seconds": 0.0}

    def _digests(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """{"digests": by name, "digest_seconds": of the rank that took longest}: the embedded
        server's own, or those of SGLang with our plugin, which has a record of every rank. All
        ranks take whole tensors and must have taken the same; each must be loaded by one at least,
        for others may have no use for it (experts).
        """
        if isinstance(reply.get("digests"), dict):
            seconds = float(reply.get("digest_seconds", 0.0))
            return {"digests": reply["digests"], "digest_seconds": seconds}
        told = self._ranks(reply)
        dropped = of_all(told, "megarl:dropped")
        seconds = max(float(rank["megarl:seconds"]) for rank in told)
        told = [named(rank) for rank in told]
        if any(rank != told[0] for rank in told):
            raise ServerError(f"{self.name}: its {len(told)} ranks received different weights")
        if dropped:
            raise ServerError(
                f"{self.name}: its model has no place for {len(dropped)} of {len(told[0])} weights "
                f"that it received: {dropped[:5]}; SGLang skips such names in silence"
            )
        return {"digests": told[0], "digest_seconds": seconds}

    def _ranks(self, reply: Mapping[str, Any]) -> list[dict[str, str]]:
        told = [dict(rank.get("checksums") or {}) for rank in reply.get("ranks", ())]
        if not told or any("megarl:dropped" not in rank for rank in told):
            raise ServerError(
                f"{self.name}: found no weight digests in the reply; expected: one for every "
                f"tensor (an SGLang server needs megarl's plugin, version {PLUGIN_VERSION})"
            )
        if len(told) % self.ranks:  # of several replicas a multiple
            raise ServerError(f"{self.name}: {len(told)} of its {self.ranks} ranks tell digests")
        return told

    async def _run(
        self, op: str, calls: tuple[Call, ...], payload: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        at = calls[0]
        try:
            async with asyncio.timeout(timeout_s), new_session(self._headers) as session:
                for at in (call for call in calls if call.wanted(payload)):
                    answer = await self._ask(session, at, payload)
                    if why := at.wrong(answer):
                        raise ServerError(f"{self.name}: {why}")
                    reply = answer or reply
        except TimeoutError as error:
            raise NoAnswerError(
                f"{self.name}: {op}: {at.path} did not end within {timeout_s:g} s"
            ) from error
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self.name}: {op}: {at.path}: {reason}") from error
        return reply

    async def _ask(
        self, session: aiohttp.ClientSession, call: Call, payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        for left in range(call.tries - 1, -1, -1):
            try:
                return await self._once(session, call, call.body(payload))
            except ServerError:
                if call.may_be_refused(payload):
                    return {}
                if not left:
                    raise
            if call.before is not None:
                with contextlib.suppress(ServerError):
                    await self._once(session, call.before, call.before.body(payload))
            else:
                await asyncio.sleep(_RETRY_S)
        raise AssertionError("unreachable")

    async def _once(
        self, session: aiohttp.ClientSession, call: Call, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        no_limit = aiohttp.ClientTimeout(total=None)
        content = body if call.method == "POST" else None
        request = session.request(call.method, self.url + call.path, json=content, timeout=no_limit)
        async with request as response:
            status, text = response.status, await response.text()
        if status != 200:
            raise ServerError(f"{self.name}: {call.path}: HTTP {status}: {_message(text)}")
        if not call.json_reply:
            return {}
        try:
            reply = json.loads(text)
        except ValueError as error:
            raise ServerError(f"{self.name}: {call.path}: not JSON: {text[:200]!r}") from error
        if reply is None and call.or_null:
            return {}
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
