"""What the settings of rollouts imply together: servers, schedules, determinism, failures."""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from megarl.config.rollout import RolloutSection, staleness_bound
from megarl.config.schema import Config
from megarl.errors import Problem

# What a run says to SGLang itself, under every name that SGLang has for it
_SET_BY_THE_RUN = (
    *("--config", "--api-key", "--admin-api-key", "--host", "--port", "--weight-version"),
    *("--model-path", "--model", "--dtype", "--context-length"),
    *("--tp-size", "--tensor-parallel-size", "--ep-size", "--expert-parallel-size", "--ep"),
    *("--dp-size", "--data-parallel-size", "--attn-dp-size", "--enable-dp-attention"),
    *("--preferred-sampling-params", "--enable-watermark"),  # requests say what is sampled
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
    yield from _found(config)
    yield from _router(config)
    yield from _parallel(config.rollout, hf)
    yield from _served_otherwise(config, hf)
    yield from _staleness(config.rollout)
    yield from _in_flight(config)
    yield from _replayed(config)
    yield from _deterministic(config.rollout)
    yield from _failures(config)


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


def _found(config: Config) -> Iterator[Problem]:
    """Servers that are not started by the trainer."""
    rollout = config.rollout
    if rollout.discover and rollout.urls:
        accepted = "servers of rollout.urls, or those that `megarl servers` has started; not both"
        yield Problem("rollout.discover", "true with rollout.urls", accepted)
    if rollout.discover and config.on_failure.servers == "stop":
        accepted = "restart, or null: discovered servers come and go, and a supervisor sees to them"
        yield Problem("on_failure.servers", "stop with rollout.discover", accepted)


def _router(config: Config) -> Iterator[Problem]:
    """What sglang-router 0.3.2 can be used with (rollout/router.py)."""
    command = config.rollout.router_command
    if not command:
        return
    if len(command) < 3 or command[1] != "-m":
        accepted = "[PROGRAM, -m, MODULE, ...], e.g. [python, -m, sglang_router.launch_router]"
        yield Problem("rollout.router_command", _word(command), accepted)
    if config.rollout.engine != "sglang":
        accepted = "sglang with rollout.router_command: a router asks the embedded server without a"
        yield Problem("rollout.engine", config.rollout.engine, f"{accepted} key, and is refused")
    if config.moe.routing_replay == "rollout":
        accepted = "none or old_logprobs with rollout.router_command: a router drops routed experts"
        yield Problem("moe.routing_replay", "rollout", accepted)


def _parallel(rollout: RolloutSection, hf: Mapping[str, Any]) -> Iterator[Problem]:
    """SGLang's own conditions: experts and attention replicas are spread over the ranks of --tp."""
    tp, experts = rollout.server_tp, hf.get("num_experts") or hf.get("n_routed_experts")
    if tp % rollout.server_ep:
        accepted = f"a divisor of rollout.server_tp = {tp}, over whose ranks experts are spread"
        yield Problem("rollout.server_ep", str(rollout.server_ep), accepted)
    elif experts and experts % rollout.server_ep:
        accepted = f"a divisor of the model's {experts} experts"
        yield Problem("rollout.server_ep", str(rollout.server_ep), accepted)
    if tp % rollout.server_dp:
        accepted = f"a divisor of rollout.server_tp = {tp}, whose ranks replicas of attention share"
        yield Problem("rollout.server_dp", str(rollout.server_dp), accepted)


def _staleness(rollout: RolloutSection) -> Iterator[Problem]:
    ahead = rollout.schedule != "synchronous"
    if ahead and staleness_bound(rollout) < 1:
        accepted = f"at least 1: rollout.schedule={rollout.schedule} samples before the step before"
        yield Problem(
            "rollout.max_staleness", str(rollout.max_staleness), f"{accepted} has trained"
        )
    if rollout.request_timeout_s < rollout.probe_timeout_s:
        found = f"{rollout.request_timeout_s:g}"
        accepted = (
            f"at least rollout.probe_timeout_s = {rollout.probe_timeout_s:g}: a server that is "
            "busy for so long is not given up"
        )
        yield Problem("rollout.request_timeout_s", found, accepted)


def _in_flight(config: Config) -> Iterator[Problem]:
    """All samples of a prompt are asked of one server together."""
    most = config.rollout.max_in_flight
    if most is None:
        return
    wanted = {"data.samples_per_prompt": config.data.samples_per_prompt}
    for i, chosen in enumerate(config.eval.sets):
        wanted[f"eval.sets[{i}].samples_per_prompt"] = chosen.samples_per_prompt
    for key, samples in wanted.items():
        if most < samples:
            accepted = f"at least {key} = {samples}, which are asked of a server together"
            yield Problem("rollout.max_in_flight", str(most), accepted)


def _replayed(config: Config) -> Iterator[Problem]:
    """SGLang reads experts when a response has ended, after the prefix was computed anew."""
    rollout = config.rollout
    embedded = rollout.engine == "embedded" and not rollout.urls and not rollout.discover
    if embedded or config.moe.routing_replay != "rollout" or rollout.schedule != "asynchronous":
        return
    if rollout.pause_mode == "retract":
        accepted = (
            "in_place or abort: with retract SGLang tells, of tokens that were sampled before "
            "weights arrived, the experts that the new weights choose; or another "
            "moe.routing_replay"
        )
        found = "retract with moe.routing_replay=rollout"
        yield Problem("rollout.pause_mode", found, accepted)


def _deterministic(rollout: RolloutSection) -> Iterator[Problem]:
    """What lets a run depend on what ends first, or on what is computed together."""
    if not rollout.deterministic:
        return
    wanted = (
        ("engine", rollout.engine, ("embedded",), "SGLang's bits depend on what it batches"),
        ("urls", rollout.urls, ((),), "how named servers compute is not known here"),
        ("discover", rollout.discover, (False,), "nor how discovered ones do"),
        ("fixed_shape", rollout.fixed_shape, (True,), "bits would depend on what is batched"),
        (
            *("schedule", rollout.schedule, ("synchronous", "one_step_off")),
            "a sample's versions would depend on when it is sampled",
        ),
        ("over_sampling", rollout.over_sampling, (1.0,), "a step would take what ends first"),
    )
    for name, found, accepted, reason in wanted:
        if found not in accepted:
            words = " or ".join(_word(value) for value in accepted)
            key = f"rollout.{name}"
            yield Problem(key, f"{_word(found)} with rollout.deterministic", f"{words}: {reason}")


def _word(value: object) -> str:
    """As YAML has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]" if value else "none"
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _failures(config: Config) -> Iterator[Problem]:
    failure = config.on_failure
    for part in ("servers", "collectors", "trainer"):
        if getattr(failure, part) == "restart" and failure.max_restarts == 0:
            accepted = "at least 1 in on_failure.max_restarts; or stop"
            yield Problem(f"on_failure.{part}", "restart with no restarts", accepted)


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
