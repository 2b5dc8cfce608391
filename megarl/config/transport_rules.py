"""What the way of weights to servers implies for servers, paths and schedules."""

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from megarl.config.schema import Config
from megarl.errors import Problem


def transport_problems(config: Config) -> Iterator[Problem]:
    """Of ``run.mode=rl``."""
    if config.run.mode != "rl":
        return
    if config.sync.transport == "colocated":
        yield from _one_machine(config)
    if config.sync.transport == "disk":
        yield from _folder(config)
    rollout = config.rollout
    if rollout.release_memory and rollout.schedule != "synchronous":
        found = f"true with rollout.schedule={rollout.schedule}"
        accepted = "false, or synchronous: servers sample while the trainer trains"
        yield Problem("rollout.release_memory", found, accepted)


def _one_machine(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.discover:
        found = "colocated with rollout.discover"
        accepted = "broadcast or disk: discovered servers may be on any machine"
        yield Problem("sync.transport", found, accepted)
    for i, url in enumerate(rollout.urls):
        if not _is_loopback(url):
            accepted = (
                "http://127.0.0.1:port (or localhost, or [::1]) with sync.transport=colocated: "
                "servers read the trainer's memory; or broadcast or disk"
            )
            yield Problem(f"rollout.urls[{i}]", url, accepted)


def _folder(config: Config) -> Iterator[Problem]:
    folder = config.sync.folder
    if config.sync.delta:
        accepted = "false, or broadcast or colocated: a folder holds whole weights"
        yield Problem("sync.delta", "true with sync.transport=disk", accepted)
    models = {"model.hf": config.model.hf, "rollout.model": config.rollout.model}
    for key, model in models.items():
        if folder is not None and model is not None and folder.resolve() == model.resolve():
            accepted = "a folder of its own: what a run publishes there is removed again"
            yield Problem("sync.folder", f"{folder}, the folder of {key}", accepted)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
