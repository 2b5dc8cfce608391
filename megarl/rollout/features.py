"""What servers can do, by engine and version: one table, and who is refused.

What differs between versions of SGLang, as far as a trainer uses it:

* 0.5.20: weights are received without a session. Since 0.5.21 `/begin_weight_update` and
  `/end_weight_update` around them are compulsory.

Others may work, but nobody has seen it: they are refused before anything is sampled.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import UnfitServerError

EMBEDDED = "megarl-embedded"
SGLANG = "sglang"
SGLANG_SPARE = 6
"""Of its context SGLang 0.5.23 leaves two tokens free, and takes no prompt that reaches into the
last six: it would end the longest responses early, without a word, and not continue them.
"""


@dataclass(frozen=True)
class Features:
    """What an engine of some versions needs of a weight push."""

    weight_session: bool = True  # begin and end around the buckets


@dataclass(frozen=True)
class _Row:
    engine: str
    since: tuple[int, ...]
    until: tuple[int, ...]  # the last version
    features: Features

    def __str__(self) -> str:
        first, last = (".".join(map(str, bound)) for bound in (self.since, self.until))
        return f"{self.engine} {first}" if first == last else f"{self.engine} {first} to {last}"


ROWS = (
    _Row(EMBEDDED, (0, 1, 0), (0, 1, 0), Features()),
    _Row(SGLANG, (0, 5, 20), (0, 5, 20), Features(weight_session=False)),
    _Row(SGLANG, (0, 5, 21), (0, 5, 23), Features()),
)


def features_of(version: str) -> Features:
    """Of a server like "sglang 0.5.23" (`Member.version`). Raises UnfitServerError for one that
    nobody has tried."""
    engine, _, number = version.partition(" ")
    digits = re.match(r"\d+(\.\d+)*", number)
    found = tuple(map(int, digits[0].split("."))) if digits else ()
    for row in ROWS:
        if row.engine == engine and row.since <= found[:3] <= row.until:
            return row.features
    raise UnfitServerError(
        f"the server is {version}; supported: {', '.join(map(str, ROWS))}. Name one of these in "
        "rollout.server_command, or leave rollout.engine at embedded"
    )


def longest_of(info: Mapping[str, Any]) -> int | None:
    """Tokens of a prompt and a response that a server takes together and whole, out of
    `/server_info`; None where it does not say. SGLang's `max_req_input_len` is the length from
    which on a prompt is refused: `SGLANG_SPARE` less than its context, or than the keys and values
    that it has room for, if these are fewer.
    """
    limit, context = info.get("max_req_input_len"), info.get("context_length")
    if isinstance(limit, int):
        return limit
    spare = 0 if info.get("engine") == EMBEDDED else SGLANG_SPARE
    return context - spare if isinstance(context, int) else None


def require_length(longest: int | None, wanted: int) -> None:
    """Raises UnfitServerError for a server that does not take sequences of `wanted` tokens."""
    if longest is None or longest >= wanted:
        return
    more = f"--context-length {wanted + SGLANG_SPARE} and as many of --max-total-tokens"
    raise UnfitServerError(
        f"rollout.context_length: found {wanted}; accepted: at most {longest}, what the server "
        f"takes of a prompt and its response. Or start it with a longer context (SGLang: {more}; "
        f"megarl serve: --context-length {wanted})"
    )


def version_of(info: Mapping[str, Any]) -> str:
    """Engine and version out of `/server_info`."""
    return f"{info.get('engine', SGLANG)} {info.get('version', '(no version)')}"
