"""A rollout server as a weight push sees it: operations of `WeightSink.control` on SGLang's
endpoints."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from megarl.errors import ServerError
from megarl.rollout.features import PLUGIN_VERSION, features_of

_RETRY_S = 0.1
_KV_CACHE, _WEIGHTS = "kv_cache", "weights"


@dataclass(frozen=True)
class Call:
    """One request of an operation; `body` is made from the operation's payload. The reply is an
    object of JSON, `or_null`, or, without `json_reply`, anything.

    `tries`: times that it is asked while the server refuses, a tenth of a second apart. `before`:
    what is called before it is asked again, and may be refused. `wanted`: whether it is made at all
    with this payload; `may_be_refused`: whether a refusal is no failure then. `wrong`: what in the
    reply makes it one.
    """

    path: str
    body: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    json_reply: bool = True
    or_null: bool = False
    method: str = "POST"
    tries: int = 1
    before: "Call | None" = None
    wanted: Callable[[Mapping[str, Any]], bool] = lambda payload: True
    may_be_refused: Callable[[Mapping[str, Any]], bool] = lambda payload: False
    wrong: Callable[[Mapping[str, Any]], str] = lambda reply: ""


def _given(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    return payload


def _nothing(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


_END = Call("/end_weight_update", _nothing)
# An update that was left open half-way is closed first: SGLang refuses a second one.
_BEGIN = Call("/begin_weight_update", _nothing, tries=2, before=_END)


def _in_place(payload: Mapping[str, Any]) -> bool:
    """Requests that are paused in place keep the keys and values of the old weights on purpose, and
    a cache in use is never emptied.
    """
    return payload.get("mode") == "in_place"


def _unfit_in_place(info: Mapping[str, Any]) -> str:
    """What SGLang 0.5.23 would do wrong. It overlaps steps: a token may have been sampled that no
    request has yet. Every other pause waits for it; this one leaves it, and it is then counted
    among the new version's. And it keeps prefixes of what runs, with keys of the old weights, for
    requests that come after the push.
    """
    needed = {
        "disable_overlap_schedule": "it would count a token that old weights sampled as new",
        "disable_radix_cache": "it would answer new requests from prefixes of old weights",
    }
    wrong = [
        f"{why} without --{setting.replace('_', '-')}"
        for setting, why in needed.items()
        if info.get(setting) is False
    ]
    found = " and ".join(wrong)
    return found and f"rollout.pause_mode=in_place: {found} (rollout.server_args); or use retract"


def _in_session(payload: Mapping[str, Any]) -> bool:
    """Whether weights come between the begin and the end of an update, as all do but a folder's."""
    return bool(payload.get("session", True)) and payload.get("open") is not False


def _open(payload: Mapping[str, Any]) -> bool:
    """Whether an update was begun by us and has not ended."""
    return bool(payload.get("open"))


def _checked(action: str) -> Call:
    body = {"action": action, "selector": "target"}
    return Call("/weights_checker", lambda p: body, wrong=_unproven)


def _unproven(reply: Mapping[str, Any]) -> str:
    """What SGLang's ranks say against themselves by our plugin."""
    ranks = [rank.get("checksums") or {} for rank in reply.get("ranks", ())]
    errors = [f"rank {k}: {r['megarl:error']}" for k, r in enumerate(ranks) if "megarl:error" in r]
    if errors:
        return "; ".join(errors)
    stale = _of_all(ranks, "megarl:unwritten")
    if not stale:
        return ""
    return (
        f"a push writes nothing to {len(stale)} parameters of its model, which stay as they were: "
        f"{stale[:5]}"
    )


def _named(rank: Mapping[str, str]) -> dict[str, str]:
    """Digests by name, of what a rank says."""
    return {name: found for name, found in rank.items() if not name.startswith("megarl:")}


def _of_all(ranks: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """The names that all ranks list there."""
    listed = [set(json.loads(rank.get(key, "[]"))) for rank in ranks]
    return sorted(set.intersection(*listed)) if listed else []


def _keeps_memory(info: Mapping[str, Any]) -> str:
    """SGLang says yes to a release all the same."""
    if info.get("enable_memory_saver") is not False:
        return ""
    return (
        "rollout.release_memory: it keeps its memory without --enable-memory-saver; start it so, "
        "or leave rollout.release_memory out"
    )


OPERATIONS: Mapping[str, tuple[Call, ...]] = {
    "held": (_checked("held"),),
    "begin": (
        Call("/server_info", _nothing, method="GET", wanted=_in_place, wrong=_unfit_in_place),
        Call("/pause_generation", lambda p: {"mode": p.get("mode", "retract")}),
        replace(_BEGIN, wanted=lambda p: bool(p.get("session", True))),
    ),
    "join_group": (Call("/init_weights_update_group", _given),),
    "leave_group": (Call("/destroy_weights_update_group", _given),),
    "receive": (
        Call(
            "/update_weights_from_distributed",
            lambda p: {"load_format": "flattened_bucket", "flush_cache": False, **p},
        ),
    ),
    "receive_shared": (Call("/update_weights_from_shared_memory", _given),),  # embedded
    "receive_tensors": (  # SGLang
        Call(
            "/update_weights_from_tensor",
            lambda p: {"load_format": "flattened_bucket", "flush_cache": False, **p},
        ),
    ),
    "load_path": (Call("/update_weights_from_disk", _given),),
    "digest": (_checked("digest"),),
    # Of weights as they are served, which SGLang makes of what was loaded when an update ends.
    "snapshot": (
        replace(_END, wanted=_open),
        _checked("digest_snapshot"),
        replace(_BEGIN, wanted=_open),
    ),
    "compare": (replace(_END, wanted=_open), _checked("digest_compare")),
    "commit": (
        replace(_END, wanted=_in_session),
        Call(
            "/resume_memory_occupation",
            lambda p: {"tags": [_KV_CACHE]},
            or_null=True,
            wanted=lambda p: bool(p.get("released")),
        ),
        # Requests that a pause has ended may leave the scheduler a moment later.
        Call("/flush_cache", _nothing, json_reply=False, tries=100, may_be_refused=_in_place),
        Call(
            "/update_weight_version",
            lambda p: {"new_version": str(p["version"]), "abort_all_requests": False},
        ),
        Call("/continue_generation", _nothing),
    ),
    "alive": (Call("/server_info", _nothing, method="GET"),),
    # SGLang's scheduler ends where requests run, or where what is resumed was not released. Memory
    # of keys and values comes last: until the weights are there others need the room.
    "release": (
        Call("/server_info", _nothing, method="GET", wrong=_keeps_memory),
        Call("/pause_generation", lambda p: {"mode": "retract"}),
        Call("/flush_cache", _nothing, json_reply=False, tries=100),
        Call(
            "/release_memory_occupation",
            lambda p: {"tags": [_KV_CACHE, _WEIGHTS]},
            or_null=True,
        ),
    ),
    "resume_memory": (
        Call("/resume_memory_occupation", lambda p: {"tags": [_WEIGHTS]}, or_null=True),
    ),
}


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
        within `timeout_s` (of all calls together).
        """
        if op in ("snapshot", "compare", "commit"):
            payload = {**payload, "open": self._open, "released": self._released}
        reply = asyncio.run(self._run(op, OPERATIONS[op], payload, timeout_s))
        if op == "begin":
            self._open = bool(payload.get("session", True))
        elif op in ("compare", "commit"):
            self._open = False if op == "compare" else None
        if op == "held":
            return self._held(reply)
        return self._digests(reply) if op == "digest" else reply

    def _held(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """As `_digests`, but of SGLang what all ranks hold alike and not all have dropped."""
        if isinstance(reply.get("digests"), dict):
            return self._digests(reply)
        told = self._ranks(reply)
        dropped = _of_all(told, "megarl:dropped")
        first, *others = (_named(rank) for rank in told)
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
        dropped = _of_all(told, "megarl:dropped")
        seconds = max(float(rank["megarl:seconds"]) for rank in told)
        told = [_named(rank) for rank in told]
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
            raise ServerError(
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
