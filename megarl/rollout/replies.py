"""What a server answers to `/generate`, checked and taken over. Nothing is repaired.

1. As many log-probs as tokens, all finite, of those very tokens; a known finish reason that fits
   the number of tokens; version spans that cover the response without a gap.
2. One answer for every sequence that was asked for, each under its own request id. An answer that
   is wrong costs its own sequence; one from which the sequences cannot be told costs all of them.
3. Where a token was sampled by other weights than a server is known to have, nothing is an answer
   (`OtherWeights`): it is another process than the one that was given them.
4. Routed experts: a row for every token but the last, of what a router can choose. A response that
   was aborted need not have any: it was perhaps never routed. They are most of a reply (SGLang: 4
   bytes an expert, then base64), so they are cut out before the rest is parsed, and never copied.
"""

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megarl.ops.routing_codec import CodecError, from_base64, narrow
from megarl.types import Completion, Finish, RoutingShape, VersionSpan

_LOGPROB_SLACK = 1e-3  # rounding may lift the log-prob of a certain token above 0
_LOWEST = -float(np.finfo(np.float32).max)
_FINISHES: tuple[Finish, ...] = ("stop", "length", "abort")
_FIRST, _SECOND = itemgetter(0), itemgetter(1)
_TABLE = re.compile(rb'"routed_experts":\s*"')
_NAME = f"table {secrets.token_hex(8)}"  # what no server says
Tables = dict[str, memoryview]


@dataclass(frozen=True)
class Ask:
    """One sequence of a request. ``tokens``: the prompt, and what was sampled before."""

    rid: str
    tokens: Sequence[int]
    budget: int  # tokens that may follow
    seed: int
    rows: int = 0  # of routing that are known already


@dataclass(frozen=True)
class Answer:
    """``parts`` in the order of what was asked; None where the answer is wrong, ``wrong`` says how
    (of the first).
    """

    parts: tuple[Completion | None, ...]
    wrong: str = ""


class OtherWeights(Exception):
    """Its text says which."""


def read_answer(
    raw: bytes, asks: Sequence[Ask], routing: RoutingShape | None, least_version: int = 0
) -> Answer:
    """``routing``: the shape of the routed experts that were asked for. A part's rows begin where
    its ``Ask.rows`` end. ``least_version``: of the weights that may have sampled it; they may be
    newer. Raises OtherWeights.
    """
    nothing = (None,) * len(asks)
    tables: Tables = {}
    try:
        replies = orjson.loads(raw if routing is None else _without_tables(raw, tables))
    except ValueError:
        return Answer(nothing, _complaint(asks[0].rid, f"{raw[:100]!r}", "JSON"))
    if not isinstance(replies, list) or len(replies) != len(asks):
        count = len(replies) if isinstance(replies, list) else 1
        found = _complaint(asks[0].rid, f"{count} responses", f"{len(asks)} responses")
        return Answer(nothing, found)
    parts: list[Completion | None] = []
    wrong, start = "", first_row(asks)
    for reply, ask in zip(replies, asks, strict=True):
        try:
            parts.append(read_part(reply, ask, routing, start, tables, least_version))
            continue
        except _Mismatch as error:
            found = _complaint(ask.rid, error.found, error.expected)
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            OverflowError,
            AttributeError,
        ) as error:
            found = _complaint(ask.rid, f"{error!r} in {str(reply)[:200]}", "a response")
        parts.append(None)
        wrong = wrong or found
    return Answer(tuple(parts), wrong)


def first_row(asks: Sequence[Ask]) -> int:
    """From where on routing is asked for: one number for a whole request."""
    return min(ask.rows for ask in asks)


def _without_tables(raw: bytes, tables: Tables) -> bytes:
    """The JSON with a name instead of every table of routed experts, which ``tables`` then has. A
    string with an escape in it stays, for the parser.
    """
    whole, at = memoryview(raw), 0
    parts: list[bytes | memoryview] = []
    while (found := _TABLE.search(raw, at)) is not None:
        start = end = found.end()
        closing = raw.find(b'"', start)
        parts.append(whole[at:start])
        if closing >= 0 and raw.find(b"\\", start, closing) < 0:
            name, end = f"{_NAME} {len(tables)}", closing
            tables[name] = whole[start:end]
            parts.append(name.encode())
        at = end
    return b"".join([*parts, whole[at:]])


def read_part(
    reply: Any,
    ask: Ask,
    routing: RoutingShape | None,
    first_row: int = 0,
    tables: Tables | None = None,
    least_version: int = 0,
) -> Completion:
    """One reply. Raises OtherWeights, _Mismatch, or what indexing wrong JSON raises."""
    tokens, meta = reply["output_ids"], reply["meta_info"]
    count = len(tokens)
    _check_versions(meta, least_version)
    finish = meta["finish_reason"]["type"]
    if meta["id"] != ask.rid:
        raise _Mismatch(f"an answer to {meta['id']!r}", f"one to {ask.rid!r}")
    if finish not in _FINISHES:
        raise _Mismatch(f"finish reason {finish!r}", " or ".join(_FINISHES))
    if not (set(map(type, tokens)) <= {int} and min(tokens, default=0) >= 0):
        raise _Mismatch(f"output_ids {tokens!r:.80}", "integers, 0 or above")
    logprobs = _logprobs(tokens, meta, finish)
    _check_count(count, finish, ask.budget)
    matched = meta["finish_reason"].get("matched", tokens[-1] if tokens else None)
    if finish == "stop" and matched != tokens[-1]:
        raise _Mismatch(f"a stop for {matched!r}", f"one for the last token, {tokens[-1]}")
    rows = None
    if routing is not None:
        encoded: Any = meta.get("routed_experts")
        if isinstance(encoded, str):
            encoded = (tables or {}).get(encoded, encoded.encode())
        end = len(ask.tokens) + count - 1
        if finish != "abort" or _has_rows(encoded, end - first_row, routing):
            rows = _routing(encoded, end - first_row, routing)[ask.rows - first_row :]
    return Completion(
        request_id=ask.rid,
        token_ids=np.array(tokens, np.int32),
        logprobs=logprobs,
        finish=finish,
        version_spans=_spans(meta, count),
        routing=rows,
    )


class _Mismatch(Exception):
    def __init__(self, found: object, expected: str) -> None:
        super().__init__(found, expected)
        self.found, self.expected = str(found), expected


def _complaint(rid: str, found: str, expected: str) -> str:
    return f"request {rid}: found {found}; expected: {expected}"


def _logprobs(tokens: list[int], meta: dict[str, Any], finish: str) -> NDArray[np.float32]:
    """f32 [tokens] of triples (log-prob, token, text)."""
    count = len(tokens)
    nothing: list[Any] | None = [] if finish == "abort" and count == 0 else None
    entries = meta.get("output_token_logprobs", nothing)
    if not isinstance(entries, list):
        raise _Mismatch("no output_token_logprobs", f"{count} log-probs")
    if len(entries) != count:
        raise _Mismatch(f"{len(entries)} log-probs", f"{count}, one a token")
    values = list(map(_FIRST, entries))
    numbers = set(map(type, values)) <= {float, int}
    if not numbers or (values and not (min(values) >= _LOWEST and max(values) <= _LOGPROB_SLACK)):
        raise _Mismatch(f"{values!r:.200}", "finite log-probs, 0 or less")
    if list(map(_SECOND, entries)) != tokens:
        raise _Mismatch("log-probs of other tokens", "those of output_ids")
    return np.array(values, np.float32)


def _check_count(count: int, finish: str, limit: int) -> None:
    if count > limit:
        raise _Mismatch(f"{count} tokens", f"at most {limit}")
    if finish == "length" and count != limit:
        raise _Mismatch(f"a stop for length after {count} tokens", f"one after {limit}")
    if finish == "stop" and count == 0:
        raise _Mismatch("a stop without an end token", "at least one token")


def _check_versions(meta: dict[str, Any], least: int) -> None:
    """Raises OtherWeights, whatever else is wrong."""
    for entry in meta.get("weight_versions") or [{"version": meta["weight_version"]}]:
        version = entry["version"]
        if not isinstance(version, str) or not version.isdecimal() or int(version) < least:
            expected = f"{least} or above, as a weight push sets it"
            raise OtherWeights(f"found weight version {version!r:.80}; expected: {expected}")


def _spans(meta: dict[str, Any], count: int) -> tuple[VersionSpan, ...]:
    """As the server gives them; one for all where it gives a single version only."""
    raw = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": count}
    ]
    spans, at = [], 0
    for entry in raw:
        version, start, end = entry["version"], entry["start"], entry["end"]
        if not (type(start) is type(end) is int and start == at <= end):
            raise _Mismatch(f"version spans {raw}", f"spans over 0..{count}")
        spans.append(VersionSpan(int(version), start, end))
        at = end
    if at != count:
        raise _Mismatch(f"version spans {raw}", f"spans over 0..{count}")
    return tuple(spans)


def _has_rows(encoded: bytes | memoryview | None, rows: int, shape: RoutingShape) -> bool:
    """Whether an aborted response brings so many: it may have none, or an empty table."""
    numbers = [rows * layers * shape.topk for layers in _layers(shape)]
    return (
        rows > 0 and encoded is not None and len(encoded) in [-(-4 * n // 3) * 4 for n in numbers]
    )


def _routing(encoded: Any, rows: int, shape: RoutingShape) -> NDArray[Any]:
    """u8 | u16 [rows, MoE layers, top-k]. Servers report all layers, with anything for dense ones
    (SGLang), or those with experts (the embedded server).
    """
    if not isinstance(encoded, bytes | memoryview):
        raise _Mismatch("no routed_experts", "routed experts in base64")
    try:
        flat = from_base64(encoded)
    except CodecError as error:
        found = f"routed experts that do not decode ({error})"
        raise _Mismatch(found, "base64 of int32") from error
    some, every = _layers(shape)
    layers = flat.size / (rows * shape.topk)
    if layers not in (some, every):
        raise _Mismatch(
            f"{flat.size} routed experts, those of {layers:g} layers",
            f"{(rows, some, shape.topk)}, or of all {every} layers",
        )
    ids = flat.reshape(rows, int(layers), shape.topk)
    if layers != some:
        ids = ids[:, list(shape.moe_layers)]
    try:
        return narrow(ids, shape.experts)
    except CodecError as error:
        raise _Mismatch(f"routed experts that cannot be ({error})", "a router's choice") from error


def _layers(shape: RoutingShape) -> tuple[int, int]:
    return shape.num_moe_layers, len(shape.moe_layers)
