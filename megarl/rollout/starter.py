"""How a managed server is started, and when it answers.

Its key reaches it through a file. Start servers from the process that shall outlive them: they end
when it does.
"""

import json
import logging
import os
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megarl.config.rollout import RolloutSection
from megarl.errors import ServerError
from megarl.rollout.features import PLUGIN_FOLDER, SGLANG_SPARE, require_length, require_plugin
from megarl.rollout.managed import ManagedServer, open_private, spawn
from megarl.rollout.probe import Probe
from megarl.rollout.process import lives
from megarl.rundir import RunDir, write_json
from megarl.types import Member

log = logging.getLogger(__name__)

EMBEDDED_COMMAND = (sys.executable, "-m", "megarl.cli", "serve")
_POLL_S = 0.05
_PROGRESS_S = 10.0
_PROBE_S = 20.0
_PORT_TRIES = 3
# The spare tokens may reach beyond the positions that the model has; no sequence does.
_ENVIRONMENT: dict[str, dict[str, str]] = {
    "embedded": {},
    "sglang": {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
}
_SGLANG_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Starter:
    """What all managed servers of a run have in common. `host`: an address of this machine, the
    only one they listen on. `routing`: they can say which experts tokens were routed to.
    """

    section: RolloutSection
    run_dir: RunDir
    model: Path
    dtype: str
    key_file: Path
    key: str
    host: str
    routing: bool
    progress: Callable[[str], None]
    embedded_command: tuple[str, ...] = EMBEDDED_COMMAND

    def start(
        self,
        index: int,
        label: str,
        *,
        mark: str,
        spawned: Callable[[ManagedServer], None],
        ended: Callable[[ManagedServer], None],
    ) -> tuple[ManagedServer, Member]:
        """A server that answers, within `rollout.start_timeout_s`, and is told of in its file.

        `label`: what its files are called by. `spawned` is told of every process before it is
        waited for; `ended`, in a thread of its own, when one is gone. Raises ServerError with the
        end of the log. A port that we chose may be taken meanwhile: then another one is tried.
        """
        deadline = time.monotonic() + self.section.start_timeout_s
        clear_stale(self.run_dir.server(label))
        chooses_port = self.section.engine == "sglang" and self.section.port == 0
        given = self.section.port and self.section.port + index
        for attempt in range(_PORT_TRIES):
            port = free_port(self.host) if chooses_port else given
            server = self._spawn(label, port, mark)
            spawned(server)
            server.watch(lambda server=server: ended(server))  # type: ignore[misc]
            try:
                url = self._await(server, label, port, deadline)
                member = self._member(server, url)
                self._tell(server, label, member)
            except ServerError as error:
                server.stop()
                taken = "address already in use" in str(error).lower()
                if chooses_port and taken and attempt + 1 < _PORT_TRIES:
                    continue
                raise
            except BaseException:
                server.stop()
                raise
            return server, member
        raise AssertionError("unreachable")

    def withdraw(self, label: str) -> None:
        """The server has ended: whoever looks for servers finds it no more."""
        for file in (self.run_dir.server(label), self._ready_file(label)):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:  # who looks finds that it does not answer
                log.warning("%s: %s", file, error)

    def _spawn(self, label: str, port: int, mark: str) -> ManagedServer:
        command = _COMMANDS[self.section.engine](self, label, port)
        self._ready_file(label).unlink(missing_ok=True)
        log_file = self.run_dir.logs / f"server_{label}.log"
        environment = dict(_ENVIRONMENT[self.section.engine])
        if self.section.engine == "sglang":
            paths = [str(PLUGIN_FOLDER), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return spawn(f"server {label}", command, log_file, self.key, mark, environment)

    def _embedded(self, label: str, port: int) -> list[str]:
        section = self.section
        options: dict[str, object] = {
            "host": self.host,
            "port": port,
            "key-file": self.key_file,
            "ready-file": self._ready_file(label),
            "max-running": section.max_running,
            "context-length": section.context_length,
            "dtype": self.dtype,
            "fp8": section.fp8,
            "parent-pid": os.getpid(),
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        shape = "--fixed-shape" if section.fixed_shape else "--no-fixed-shape"
        return [*self.embedded_command, str(self.model), *flags, shape]

    def _sglang(self, label: str, port: int) -> list[str]:
        """SGLang takes its key as an argument or from a YAML file: the file keeps it out of argv.
        It also logs its arguments, so it runs under the guard, which blacks the key out."""
        section = self.section
        secrets_file = self.run_dir.root / f"server_{label}.key.yaml"
        with open_private(secrets_file, "w") as file:
            file.write(json.dumps({"api-key": self.key}).encode())
        guard = [sys.executable, "-m", "megarl.rollout.guard", str(os.getpid()), str(self.key_file)]
        options: dict[str, object] = {
            "config": secrets_file,
            "model-path": self.model,
            "host": self.host,
            "port": port,
            "dtype": _SGLANG_DTYPES[self.dtype],
            "context-length": section.context_length + SGLANG_SPARE,
            "tp-size": section.server_tp,
            "weight-version": 0,
        }
        if section.server_ep > 1:
            options["ep-size"] = section.server_ep
        if section.server_dp > 1:
            options["dp-size"] = section.server_dp
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        flags += ["--enable-dp-attention"] * (section.server_dp > 1)
        flags += ["--enable-return-routed-experts"] * self.routing
        flags += ["--enable-memory-saver"] * section.release_memory
        if section.pause_mode == "in_place":  # control.py says why
            flags += ["--disable-overlap-schedule", "--disable-radix-cache"]
        return [*guard, *section.server_command, *flags, *section.server_args]

    def _await(self, server: ManagedServer, label: str, port: int, deadline: float) -> str:
        """The server's URL once it answers. Raises ServerError when it ends first or takes too
        long."""
        begun = time.monotonic()
        next_probe, next_word = 0.0, begun + _PROGRESS_S
        asked: _Asked | None = None
        limit = f"{self.section.start_timeout_s:g} s"
        while True:
            now = time.monotonic()
            if not server.running:
                raise ServerError(f"{server.name} did not start: {server.cause()}")
            if now > deadline:
                waited = f"{limit} (rollout.start_timeout_s)"
                raise ServerError(
                    f"{server.name} was not ready within {waited}; {server.last_words()}"
                )
            if now > next_word:
                self.progress(
                    f"{server.name}: starting, {now - begun:.0f} s of {limit}: {server.last_line()}"
                )
                next_word = now + _PROGRESS_S
            if asked is None and now >= next_probe and (url := self._url(label, port)):
                asked = _Asked(url, self.key, max(1.0, min(_PROBE_S, deadline - now)))
            if asked is not None and asked.done.is_set():
                if asked.good:
                    return asked.url
                asked, next_probe = None, now + min(1.0, 0.1 + (now - begun) / 10)
            server.wait(_POLL_S)

    def _url(self, label: str, port: int) -> str | None:
        """None: it does not know yet itself."""
        if self.section.engine == "sglang":
            return f"http://{self.host}:{port}"
        ready_file = self._ready_file(label)
        return str(json.loads(ready_file.read_text())["url"]) if ready_file.exists() else None

    def _member(self, server: ManagedServer, url: str) -> Member:
        """Raises UnfitServerError for a server that cannot be used, ServerError for none."""
        try:
            identity = Probe(url, self.key).identity()
            require_plugin(identity.version, identity.plugin)
            require_length(identity.longest, self.section.context_length)
        except ServerError as error:
            raise type(error)(f"{server.name} cannot be used: {error}") from error
        boot, ranks = uuid.uuid4().hex[:12], self.section.server_tp
        return Member(server.name, url, boot, ranks, identity.version)

    def _tell(self, server: ManagedServer, label: str, member: Member) -> None:
        told = {
            "url": member.url,
            "pid": server.process.pid,
            "host": socket.gethostname(),
            "boot": member.boot,
            "ranks": member.ranks,
            "version": member.version,
        }
        write_json(self.run_dir.server(label), told)
        self.progress(f"{member.name}: {member.url} ({member.version}), log {server.log_file}")

    def _ready_file(self, label: str) -> Path:
        """Where an embedded server tells us its port."""
        return self.run_dir.root / f"server_{label}.ready"


class _Asked:
    """A probe in a thread of its own: meanwhile the process may end, and something else may listen
    at its port."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.url, self.good, self.done = url, False, threading.Event()
        self._probe, self._timeout_s = Probe(url, key), timeout_s
        threading.Thread(target=self._run, name=f"ask-{url}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._probe.check(self._timeout_s)
            self.good = True
        except ServerError as error:
            log.debug("%s", error)
        finally:
            self.done.set()


_COMMANDS: dict[str, Callable[[Starter, str, int], list[str]]] = {
    "embedded": Starter._embedded,
    "sglang": Starter._sglang,
}


def clear_stale(file: Path) -> None:
    """A server's file that an earlier run left is removed; a server that still runs under it is an
    error."""
    if not file.exists():
        return
    try:
        stale = json.loads(file.read_text())
        pid, host = int(stale["pid"]), str(stale["host"])
    except (ValueError, KeyError, TypeError):
        pid, host = 0, ""
    if host == socket.gethostname() and pid > 0 and lives(pid) and _is_server(pid):
        raise ServerError(f"{file} names a server that still runs (pid {pid}); end it first")
    log.warning("%s is of an earlier run (pid %d on %s); removed", file, pid, host)
    file.unlink(missing_ok=True)


def _is_server(pid: int) -> bool:
    """Whether a process looks like one of ours: numbers are used again."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(b"serve" in word or b"megarl" in word or b"sglang" in word for word in words)


def free_port(host: str) -> int:
    """Outside the range the system hands out itself: SGLang binds it half a minute later."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with suppress(OSError), socket.create_server((host, port)):
            return port
