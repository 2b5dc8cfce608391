"""What a server answers to `/generate`, checked and taken over. Nothing is repaired.

1. As many log-probs as tokens, all finite, of those very tokens; a known finish reason that fits
   the number of tokens; version spans that cover the response without a gap.
2. One answer for every sequence that was asked for, each under its own request id. An answer that
   is wrong costs its own sequence; one from which the sequences cannot be told costs all of them.
3. Routed experts: a row for every token but the last, of what a router can choose. A response that
   was aborted need not have any: it was perhaps never routed.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from megarl.ops.routing_codec import CodecError, narrow
from megarl.types import Completion, Finish, RoutingShape, VersionSpan

_LOGPROB_SLACK = 1e-3  # rounding may lift the log-prob of a certain token above 0
_LOWEST = -float(np.finfo(np.float32).max)
_FINISHES: tuple[Finish, ...] = ("stop", "length", "abort")
_FIRST, _SECOND = itemgetter(0), itemgetter(1)


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


def read_answer(raw: bytes, asks: Sequence[Ask], routing: RoutingShape | None) -> Answer:
    """``routing``: the shape of the routed experts that were asked for. A part's rows begin where
    its ``Ask.rows`` end.
    """
    nothing = (None,) * len(asks)
    try:
        replies = orjson.loads(raw)
    except ValueError:
        return Answer(nothing, _complaint(asks[0].rid, f"{raw[:100]!r}", "JSON"))
    if not isinstance(replies, list) or len(replies) != len(asks):
        count = len(replies) if isinstance(replies, list) else 1
        found = _complaint(asks[0].rid, f"{count} responses", f"{len(asks)} responses")
        return Answer(nothing, found)
    parts: list[Completion | None] = []
    wrong = ""
    for reply, ask in zip(replies, asks, strict=True):
        try:
            parts.append(read_part(reply, ask, routing, first_row(asks)))
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


def read_part(reply: Any, ask: Ask, routing: RoutingShape | None, first_row: int = 0) -> Completion:
    """One reply. Raises _Mismatch, or what indexing wrong JSON raises."""
    tokens, meta = reply["output_ids"], reply["meta_info"]
    count = len(tokens)
    finish = meta["finish_reason"]["type"]
    _expect(meta["id"] == ask.rid, f"an answer to {meta['id']!r}", f"one to {ask.rid!r}")
    _expect(finish in _FINISHES, f"finish reason {finish!r}", " or ".join(_FINISHES))
    whole = set(map(type, tokens)) <= {int} and min(tokens, default=0) >= 0
    _expect(whole, f"output_ids {tokens!r:.80}", "integers, 0 or above")
    nothing: list[Any] | None = [] if finish == "abort" and count == 0 else None
    entries = meta.get("output_token_logprobs", nothing)
    _expect(isinstance(entries, list), "no output_token_logprobs", f"{count} log-probs")
    _expect(len(entries) == count, f"{len(entries)} log-probs", f"{count}, one a token")
    values = list(map(_FIRST, entries))
    good = set(map(type, values)) <= {float, int} and (
        not values or (min(values) >= _LOWEST and max(values) <= _LOGPROB_SLACK)
    )
    _expect(good, f"{values!r:.200}", "finite log-probs, 0 or less")
    same = list(map(_SECOND, entries)) == tokens
    _expect(same, "log-probs of other tokens", "those of output_ids")
    _check_count(count, finish, ask.budget)
    rows = None
    if routing is not None:
        rows = _rows(meta, finish, len(ask.tokens) + count - 1, routing, first_row, ask.rows)
    return Completion(
        request_id=ask.rid,
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array(values, np.float32),
        finish=finish,
        version_spans=_spans(meta, count),
        routing=rows,
    )


class _Mismatch(Exception):
    def __init__(self, found: object, expected: str) -> None:
        super().__init__(found, expected)
        self.found, self.expected = str(found), expected


def _expect(condition: bool, found: object, expected: str) -> None:
    if not condition:
        raise _Mismatch(found, expected)


def _complaint(rid: str, found: str, expected: str) -> str:
    return f"request {rid}: found {found}; expected: {expected}"


def _check_count(count: int, finish: str, limit: int) -> None:
    _expect(count <= limit, f"{count} tokens", f"at most {limit}")
    if finish == "length":
        _expect(count == limit, f"a stop for length after {count} tokens", f"one after {limit}")
    if finish == "stop":
        _expect(count > 0, "a stop without an end token", "at least one token")


def _spans(meta: dict[str, Any], count: int) -> tuple[VersionSpan, ...]:
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
        start, end = entry["start"], entry["end"]
        _expect(type(start) is type(end) is int, f"version span {entry}", "integers")
        spans.append(VersionSpan(int(version), start, end))
    bounds = [0, *(span.end for span in spans)]
    covered = [span.start for span in spans] == bounds[:-1] and bounds[-1] == count
    _expect(covered and bounds == sorted(bounds), f"version spans {raw}", f"spans over 0..{count}")
    return tuple(spans)


def _rows(
    meta: dict[str, Any], finish: str, end: int, shape: RoutingShape, first: int, known: int
) -> NDArray[Any] | None:
    """u8 | u16 [end - known, MoE layers, top-k]: rows ``known`` to ``end`` of a reply whose rows
    begin at ``first``. None of a response that was aborted without having all of them.
    """
    encoded: Any = meta.get("routed_experts")
    if finish == "abort":
        wanted = {_encoded_length(end - first, layers, shape) for layers in _layers(shape)}
        if end == first or not isinstance(encoded, str) or len(encoded) not in wanted:
            return None
    return _routing(encoded, end - first, shape)[known - first :]


def _routing(encoded: Any, rows: int, shape: RoutingShape) -> NDArray[Any]:
    """Servers report all layers, with anything for dense ones (SGLang), or those with experts (the
    embedded server).
    """
    _expect(isinstance(encoded, str), "no routed_experts", "routed experts in base64")
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise _Mismatch(
            f"routed experts that do not decode ({error})", "base64 of int32"
        ) from error
    some, every = _layers(shape)
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


def _layers(shape: RoutingShape) -> tuple[int, int]:
    return shape.num_moe_layers, len(shape.moe_layers)


def _encoded_length(rows: int, layers: int, shape: RoutingShape) -> int:
    return -(-(rows * layers * shape.topk * 4) // 3) * 4
