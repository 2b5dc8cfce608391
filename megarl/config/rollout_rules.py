"""What the settings of rollouts imply together: servers, schedules, determinism, failures."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from megarl.config.rollout import RolloutSection
from megarl.config.schema import Config
from megarl.errors import Problem

# What a run says to SGLang itself, under every name that SGLang has for it
_SET_BY_THE_RUN = (
    *("--config", "--api-key", "--admin-api-key", "--host", "--port", "--weight-version"),
    *("--model-path", "--model", "--dtype", "--context-length"),
    *("--tp-size", "--tensor-parallel-size", "--ep-size", "--expert-parallel-size", "--ep"),
    *("--dp-size", "--data-parallel-size", "--attn-dp-size", "--enable-dp-attention"),
)
# By model_type, what SGLang 0.5.23 starts with and computes as if it were the value here
_SGLANG_TAKES: dict[str, dict[str, object]] = {
    "qwen3_moe": {
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    },
}


def rollout_problems(config: Config, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """Of ``run.mode=rl``; ``hf``: the model's config.json, empty where it is not at hand."""
    if config.run.mode != "rl":
        return
    yield from _servers(config)
    yield from _parallel(config.rollout, hf)
    yield from _served_otherwise(config, hf)


def server_args_problems(rollout: RolloutSection) -> Iterator[Problem]:
    """SGLang takes abbreviations: what is the beginning of a reserved argument is that one."""
    for i, argument in enumerate(rollout.server_args):
        name = argument.partition("=")[0]
        if name.startswith("--") and any(taken.startswith(name) for taken in _SET_BY_THE_RUN):
            accepted = f"anything but {', '.join(_SET_BY_THE_RUN)}: the run sets these"
            yield Problem(f"rollout.server_args[{i}]", argument, accepted)


def _servers(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.engine == "sglang" and not rollout.urls and not rollout.server_command:
        accepted = "the command that starts SGLang, or rollout.urls of servers that run"
        yield Problem("rollout.server_command", "nothing", accepted)
    if rollout.urls and rollout.key_file is None:
        accepted = "the file with the key of the servers in rollout.urls"
        yield Problem("rollout.key_file", "nothing", accepted)
    fp8 = config.precision.fp8
    if fp8 is not None and fp8.recipe == "blockwise" and rollout.fp8 not in ("none", fp8.scales):
        accepted = f"{fp8.scales}, as precision.fp8.scales, or both would have other weights"
        yield Problem("rollout.fp8", rollout.fp8, accepted)
    yield from server_args_problems(rollout)
    for i, url in enumerate(rollout.urls):
        if not _is_server_url(url):
            yield Problem(f"rollout.urls[{i}]", url, "http://host:port")
        elif url.rstrip("/") in {other.rstrip("/") for other in rollout.urls[:i]}:
            yield Problem(f"rollout.urls[{i}]", f"{url} again", "each server once")
    if rollout.port and rollout.port + rollout.servers - 1 > 65535:
        found = f"{rollout.port} for {rollout.servers} servers"
        yield Problem("rollout.port", found, "0 (any), or ports up to 65535 for all of them")


def _parallel(rollout: RolloutSection, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """SGLang's own conditions: experts and attention replicas are spread over the ranks of --tp."""
    for key, value in (("server_ep", rollout.server_ep), ("server_dp", rollout.server_dp)):
        if rollout.server_tp % value:
            accepted = f"a divisor of rollout.server_tp = {rollout.server_tp}, among whose ranks"
            what = {"server_ep": "experts lie", "server_dp": "attention is replicated"}[key]
            yield Problem(f"rollout.{key}", str(value), f"{accepted} {what}")


def _is_server_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # a port that is none, a bracket left open
        return False
    plain = not (parts.query or parts.fragment or parts.username or parts.path.strip("/"))
    return parts.scheme in ("http", "https") and bool(parts.hostname) and bool(port) and plain


def _served_otherwise(config: Config, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """A model of which servers would sample another."""
    if config.rollout.engine != "sglang":
        return
    for key, taken in _SGLANG_TAKES.get(hf.get("model_type", ""), {}).items():
        value = hf.get(key)
        if value is not None and value != taken:
            found = f"{config.model.hf}, whose {key} is {value}"
            accepted = f"{taken}, which SGLang takes it for whatever it is; or engine=embedded"
            yield Problem("model.hf with rollout.engine=sglang", found, accepted)
