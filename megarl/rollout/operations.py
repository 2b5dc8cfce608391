"""What `WeightSink.control` asks of a server: each operation's requests, on SGLang's endpoints."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
INFO = Call("/server_info", _nothing, method="GET")


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


def opens(payload: Mapping[str, Any]) -> bool:
    """Whether weights come between the begin and the end of an update, as all do but a folder's."""
    return bool(payload.get("session", True))


def _in_session(payload: Mapping[str, Any]) -> bool:
    """Whether there is an update to end, for all we know."""
    return opens(payload) and payload.get("open") is not False


def _open(payload: Mapping[str, Any]) -> bool:
    """Whether an update was begun by us and has not ended."""
    return bool(payload.get("open"))


def _checked(action: str) -> Call:
    body = {"action": action, "selector": "target"}
    return Call("/weights_checker", lambda p: body, wrong=_unproven)


def _unproven(reply: Mapping[str, Any]) -> str:
    """What SGLang's ranks say against themselves by our plugin."""
    ranks = [rank.get("checksums") or {} for rank in reply.get("ranks", ())]
    if not ranks and "digests" not in reply:
        return "/weights_checker: its reply tells of no rank"
    errors = [f"rank {k}: {r['megarl:error']}" for k, r in enumerate(ranks) if "megarl:error" in r]
    if errors:
        return "; ".join(errors)
    stale = of_all(ranks, "megarl:unwritten")
    if not stale:
        return ""
    return (
        f"a push writes nothing to {len(stale)} parameters of its model, which stay as they were: "
        f"{stale[:5]}"
    )


def named(rank: Mapping[str, str]) -> dict[str, str]:
    """Digests by name, of what a rank says."""
    return {name: found for name, found in rank.items() if not name.startswith("megarl:")}


def of_all(ranks: Sequence[Mapping[str, Any]], key: str) -> list[str]:
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
        replace(INFO, wanted=_in_place, wrong=_unfit_in_place),
        Call("/pause_generation", lambda p: {"mode": p.get("mode", "retract")}),
        replace(_BEGIN, wanted=opens),
        # A folder is no part of an update, and refused while one is open that a trainer has left.
        replace(_END, wanted=lambda p: not opens(p), may_be_refused=lambda p: True),
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
    # What samples has to answer, too, where only the scheduler empties the cache.
    "alive": (
        INFO,
        Call("/flush_cache", _nothing, json_reply=False, may_be_refused=lambda p: True),
    ),
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
