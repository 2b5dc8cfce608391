"""What travels in a `/generate` call: the part of SGLang 0.5.23's request and reply that we use.

Request: `input_ids` (one list, or a list of lists: a batch), `sampling_params` (one for all, or a
list), `rid` (likewise), `return_logprob`, `logprob_start_len`, `return_routed_experts`,
`routed_experts_start_len`. A field that would change what is sampled and that we do not implement
is refused unless it says "off": silently ignoring a penalty would make every log-prob wrong.

Reply, per sequence: `output_ids` (the end token included) and `meta_info`. Log-probs are triples
`[value, token id, null]`; the first input log-prob is null (nothing precedes it); routed experts
are base64 of int32 `[tokens - 1 - start, MoE layers, top-k]`: the last token was never fed back.
"""

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GREEDY_BELOW = (
    1e-6  # as SGLang: a smaller temperature means greedy, with log-probs at temperature 1
)
DEFAULT_NEW_TOKENS = 128
MAX_TEMPERATURE = 1e6

_NEUTRAL_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_new_tokens": (None, 0),
    "n": (None, 1),
    "beam_width": (None,),
    "logit_bias": (None,),
    "stop": (None, []),
    "stop_regex": (None, []),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "custom_params": (None,),
    "skip_special_tokens": (None, True, False),
    "spaces_between_special_tokens": (None, True, False),
    "no_stop_trim": (None, True, False),
}
_NEUTRAL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "top_logprobs_num": (None, 0),
    "return_text_in_logprobs": (None, False),
}
_SAMPLING_FIELDS = (
    "temperature",
    "max_new_tokens",
    "ignore_eos",
    "stop_token_ids",
    "sampling_seed",
    "top_p",
    "top_k",
    "min_p",
)
_FIELDS = (
    "input_ids",
    "sampling_params",
    "rid",
    "return_logprob",
    "logprob_start_len",
    "return_routed_experts",
    "routed_experts_start_len",
)


class BadRequest(ValueError):
    """The caller's fault; the text names the field, what was found and what is accepted."""

    def __init__(self, field: str, found: Any, accepted: str) -> None:
        shown = repr(found)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{field}: found {shown}; accepted: {accepted}")


@dataclass(frozen=True)
class Limits:
    """What a model and its server can take."""

    vocab_size: int
    context_length: int
    has_routing: bool


@dataclass(frozen=True)
class SamplingParams:
    temperature: float  # 0: greedy
    max_new_tokens: int
    ignore_eos: bool
    stop_token_ids: frozenset[int]
    seed: int | None
    top_p: float = 1.0
    top_k: int = -1  # all
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class GenerateRequest:
    rid: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    return_logprob: bool
    logprob_start: int  # first prompt position reported; -1: none
    return_routing: bool
    routing_start: int


@dataclass
class Generated:
    """What became of one request."""

    rid: str
    prompt_tokens: int
    token_ids: list[int]
    logprobs: list[float]
    finish: dict[str, Any]
    versions: list[tuple[str, int]]  # (version, first token it sampled), ascending
    input_logprobs: list[float] | None = None  # of prompt tokens logprob_start + 1 ...
    routing: NDArray[np.int32] | None = None  # [tokens - 1, M, K]


def parse_generate(body: Any, limits: Limits) -> tuple[list[GenerateRequest], bool]:
    """The requests in a body, and whether it was a batch. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("body", body, "a JSON object")
    for name, value in body.items():
        if name in _NEUTRAL_FIELDS:
            _require_neutral(name, value, _NEUTRAL_FIELDS[name])
        elif name not in _FIELDS:
            raise BadRequest(name, value, f"one of the fields {', '.join(_FIELDS)}")
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids", ids, "a non-empty list of token ids, or a list of such lists")
    batch = isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    count = len(prompts)
    samplings = _per_request(body, "sampling_params", count, dict, batch)
    rids = _rids(body.get("rid"), count, batch)
    starts = _per_request(body, "logprob_start_len", count, int, batch)
    return_logprob = _flag(body, "return_logprob")
    return_routing = _flag(body, "return_routed_experts")
    if return_routing and not limits.has_routing:
        raise BadRequest("return_routed_experts", True, "false: this model has no experts")
    routing_start = _integer(
        "routed_experts_start_len", body.get("routed_experts_start_len") or 0, 0
    )
    requests = []
    for i, prompt in enumerate(prompts):
        where = f"input_ids[{i}]" if batch else "input_ids"
        tokens = _token_ids(where, prompt, limits.vocab_size)
        sampling = _sampling(samplings[i] or {}, limits.vocab_size)
        _check_length(where, len(tokens), sampling.max_new_tokens, limits.context_length)
        start = (
            -1 if starts[i] is None else _integer("logprob_start_len", starts[i], -1, len(tokens))
        )
        if routing_start > len(tokens):
            raise BadRequest("routed_experts_start_len", routing_start, f"0..{len(tokens)}")
        start = start if return_logprob else -1
        requests.append(
            GenerateRequest(
                rids[i], tokens, sampling, return_logprob, start, return_routing, routing_start
            )
        )
    return requests, batch


def format_reply(
    request: GenerateRequest, result: Generated, weight_version: str
) -> dict[str, Any]:
    """SGLang's reply to one request. `weight_version` is used where no token was sampled."""
    spans = _spans(result, weight_version)
    meta: dict[str, Any] = {
        "id": result.rid,
        "finish_reason": result.finish,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": len(result.token_ids),
        "cached_tokens": 0,
        "weight_version": spans[-1]["version"],
        "weight_versions": spans,
    }
    if request.return_logprob:
        pairs = zip(result.logprobs, result.token_ids, strict=True)
        meta["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
        meta["input_token_logprobs"] = _input_logprobs(request, result)
    if request.return_routing:
        rows = np.zeros(0, np.int32) if result.routing is None else result.routing
        data = np.ascontiguousarray(rows[request.routing_start :], dtype="<i4").tobytes()
        meta["routed_experts"] = base64.b64encode(data).decode()
    return {"output_ids": result.token_ids, "meta_info": meta}


def _input_logprobs(request: GenerateRequest, result: Generated) -> list[list[Any]]:
    if result.input_logprobs is None:
        return []
    tokens = request.prompt[request.logprob_start :]
    values = [None, *result.input_logprobs]
    return [[value, token, None] for value, token in zip(values, tokens, strict=False)]


def _spans(result: Generated, weight_version: str) -> list[dict[str, Any]]:
    starts = result.versions or [(weight_version, 0)]
    ends = [start for _, start in starts[1:]] + [len(result.token_ids)]
    return [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(starts, ends, strict=True)
    ]


def _sampling(raw: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    for name, value in raw.items():
        if name in _NEUTRAL_SAMPLING:
            _require_neutral(f"sampling_params.{name}", value, _NEUTRAL_SAMPLING[name])
        elif name not in _SAMPLING_FIELDS:
            raise BadRequest(
                f"sampling_params.{name}", value, f"one of {', '.join(_SAMPLING_FIELDS)}"
            )
    temperature = raw.get("temperature", 1.0)
    temperature = 1.0 if temperature is None else temperature
    if not _is_number(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise BadRequest("sampling_params.temperature", temperature, f"0..{MAX_TEMPERATURE:g}")
    stop_ids = raw.get("stop_token_ids") or []
    if not isinstance(stop_ids, list):
        raise BadRequest("sampling_params.stop_token_ids", stop_ids, "a list of token ids")
    seed = raw.get("sampling_seed")
    if seed is not None:
        seed = _integer("sampling_params.sampling_seed", seed, -(2**63), 2**63 - 1)
    limit = raw.get("max_new_tokens")
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else float(temperature),
        max_new_tokens=_integer(
            "sampling_params.max_new_tokens", DEFAULT_NEW_TOKENS if limit is None else limit, 0
        ),
        ignore_eos=_flag(raw, "ignore_eos", "sampling_params.ignore_eos"),
        stop_token_ids=frozenset(
            _token_ids("sampling_params.stop_token_ids", stop_ids, vocab_size, may_be_empty=True)
        ),
        seed=seed,
        top_p=_fraction(raw, "top_p", 1.0, least="above 0"),
        top_k=_top_k(raw.get("top_k")),
        min_p=_fraction(raw, "min_p", 0.0, least="0"),
    )


def _fraction(raw: Mapping[str, Any], name: str, default: float, *, least: str) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if not _is_number(value) or not 0 <= value <= 1 or (value == 0 and least != "0"):
        raise BadRequest(f"sampling_params.{name}", value, f"{least} to 1")
    return float(value)


def _top_k(value: Any) -> int:
    if value is None or value == -1:
        return -1
    if type(value) is not int or value < 1:
        raise BadRequest("sampling_params.top_k", value, "1 or above, or -1 for all tokens")
    return value


def _token_ids(
    field: str, value: Any, vocab_size: int, *, may_be_empty: bool = False
) -> tuple[int, ...]:
    if not isinstance(value, list) or not (value or may_be_empty):
        raise BadRequest(field, value, "a non-empty list of token ids")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadRequest(f"{field}[{place}]", token, f"a token id, 0..{vocab_size - 1}")
    return tuple(value)


def _check_length(field: str, prompt: int, new_tokens: int, context_length: int) -> None:
    if prompt + new_tokens > context_length:
        raise BadRequest(
            f"{field} with sampling_params.max_new_tokens",
            f"{prompt} + {new_tokens} tokens",
            f"at most {context_length} together (the server's context length)",
        )


def _rids(value: Any, count: int, batch: bool) -> list[str]:
    rids: Any
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(value, str):
        rids = [f"{value}_{i}" for i in range(count)] if batch else [value]
    else:
        rids = value if batch else None
    ok = (
        isinstance(rids, list)
        and len(rids) == count
        and all(isinstance(r, str) and r for r in rids)
    )
    if not ok or len(set(rids)) != count:
        raise BadRequest(
            "rid", value, f"a string, or a list of {count} different strings for a batch"
        )
    return rids


def _per_request(
    body: Mapping[str, Any], field: str, count: int, kind: type, batch: bool
) -> list[Any]:
    """One value for every request: a single one is repeated, a list must fit the batch."""
    value = body.get(field)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return [value] * count
    if not (batch and isinstance(value, list) and len(value) == count):
        raise BadRequest(field, value, f"one {kind.__name__}, or a list of {count} for a batch")
    for place, entry in enumerate(value):
        if not isinstance(entry, kind) or isinstance(entry, bool):
            raise BadRequest(f"{field}[{place}]", entry, f"a {kind.__name__}")
    return value


def _flag(raw: Mapping[str, Any], name: str, field: str | None = None) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(field or name, value, "true or false")
    return bool(value)


def _integer(field: str, value: Any, low: int, high: int | None = None) -> int:
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"{low} or above" if high is None else f"{low}..{high}"
        raise BadRequest(field, value, f"an integer, {bounds}")
    return value


def _require_neutral(field: str, value: Any, accepted: tuple[Any, ...]) -> None:
    if not any(value is a or (type(value) is type(a) and value == a) for a in accepted):
        shown = ", ".join(repr(a) for a in accepted if a is not None) or "null"
        raise BadRequest(field, value, f"{shown} (anything else is not supported by this server)")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
