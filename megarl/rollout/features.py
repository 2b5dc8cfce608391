"""What servers can do, by engine and version: one table, and who is refused.

SGLang takes weights between `/begin_weight_update` and `/end_weight_update` since 0.5.21, where
our plugin finds what it needs, too. Other versions may work, but nobody has seen it: they are
refused before anything is sampled.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UnfitServerError

EMBEDDED = "megarl-embedded"
SGLANG = "sglang"
SGLANG_SPARE = 6
"""Of its context SGLang 0.5.23 leaves two tokens free, and takes no prompt that reaches into the
last six: it would end the longest responses early, without a word, and not continue them.
"""
PLUGIN_VERSION = "0.3.0"
PLUGIN_FOLDER = Path(__file__).parents[1] / "sync" / "sglang_plugin"
"""With it in PYTHONPATH, SGLang has the plugin; pip installs it from there, too."""


@dataclass(frozen=True)
class Features:
    """What an engine of some versions needs of a weight push."""

    plugin: bool = False  # ours, in the server, without which it says nothing of its weights


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
    _Row(SGLANG, (0, 5, 21), (0, 5, 23), Features(plugin=True)),
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


def require_plugin(version: str, plugin: str) -> None:
    """Raises UnfitServerError for a server like "sglang 0.5.23" in which our plugin is not, or is
    another than `PLUGIN_VERSION`; `plugin` is what it says of that, empty for nothing.
    """
    if not features_of(version).plugin or plugin == PLUGIN_VERSION:
        return
    raise UnfitServerError(
        f"the server ({version}) cannot prove its weights: found "
        f"{f'version {plugin}' if plugin else 'nothing'} of megarl's plugin for SGLang; accepted: "
        f"version {PLUGIN_VERSION}. Where it runs, `{plugin_command()}` (on another machine copy "
        "the folder there; megarl sglang-plugin prints it; SGLANG_PLUGINS, if set, has to name "
        "megarl_digest), then start the server again"
    )


def plugin_command() -> str:
    """What installs the plugin into an SGLang server's environment."""
    return f"pip install --no-deps --force-reinstall {PLUGIN_FOLDER}"


def plugin_of(info: Mapping[str, Any]) -> str:
    """The version of our plugin out of `/server_info`, with what it lacks; empty: there is none."""
    states = info.get("internal_states") or [{}]
    found = {str(state.get("megarl_plugin", "")) for state in states}
    return found.pop() if len(found) == 1 else " and ".join(sorted(v or "none" for v in found))


def mark_of(info: Mapping[str, Any]) -> str:
    """What tells one process of a server from the next, out of `/server_info`; empty: nothing."""
    started = info.get("boot") or info.get("startup_time") or ""
    return json.dumps(started, sort_keys=True).strip('"')


def waits_of(info: Mapping[str, Any]) -> bool:
    """Whether a server's weights are half-written, or spoiled for a proof, by its `/server_info`:
    it must not generate before it has got them whole.
    """
    states = info.get("internal_states") or []
    told = [info.get("unusable"), info.get("updating"), *(s.get("megarl_waits") for s in states)]
    return any(told)


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
