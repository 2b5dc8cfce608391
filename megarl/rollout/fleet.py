"""The rollout servers of a run: started, watched and ended here, or only named (`rollout.urls`).

A managed server is a process group of its own, logs to the run directory, gets the key through a
file, and dies with us even if we are killed. Its death is noticed at once and reported with its
cause. Start servers from the thread that lives longest, the main one: the kernel ties a child to
its thread.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megarl.config.rollout import RolloutSection
from megarl.errors import ConfigError, Problem, ServerError
from megarl.rollout.client import RolloutClient
from megarl.rollout.control import ServerControl
from megarl.rollout.process import lives, read_key, read_or_make_key
from megarl.rundir import RunDir, write_json

log = logging.getLogger(__name__)

EMBEDDED_COMMAND = (sys.executable, "-m", "megarl.cli", "serve")
LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
_TERM_S = 3.0
_TAIL_BYTES = 3000
_PORT_TRIES = 3
_SGLANG_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# What torchrun tells its workers is not for servers, which would join the trainer's world.
_NOT_INHERITED = re.compile(
    r"TORCHELASTIC_.*|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME"
)


@dataclass(frozen=True)
class ServerDeath:
    """A managed server that ended without being told to."""

    name: str
    cause: str  # "exit code 3", "signal SIGKILL", with the end of its log

    def __str__(self) -> str:
        return f"{self.name} died: {self.cause}"


class Fleet:
    """The servers that answer, and how to reach them."""

    def __init__(self, urls: Sequence[str], key: str, managed: Sequence["ManagedServer"]) -> None:
        self.urls, self.key = tuple(urls), key
        self.managed = tuple(managed)

    def controls(self) -> list[ServerControl]:
        """One WeightSink a server."""
        return [ServerControl(url, self.key) for url in self.urls]

    def close(self) -> None:
        """Ends the managed servers; external ones are left alone."""
        for server in self.managed:
            server.signal_group(signal.SIGTERM)
        for server in self.managed:
            server.stop()


def start_fleet(
    section: RolloutSection,
    *,
    run_dir: RunDir,
    model: Path,
    dtype: str,
    on_death: Callable[[ServerDeath], None],
    host: str = LOOPBACK,
    routing: bool = False,
    embedded_command: Sequence[str] = EMBEDDED_COMMAND,
) -> Fleet:
    """Servers that answer, within `rollout.start_timeout_s`.

    `model`: the Hugging Face folder; `dtype`: fp32 or bf16. The server listens on `host`
    alone, an address of this machine. `routing`: it can say which experts tokens were routed to.
    `on_death` is called from a watching thread. Raises ServerError with the end of the log when a
    server does not come up, ConfigError when the settings lack something.
    """
    if section.urls:
        return _external(section)
    key_file = section.key_file or run_dir.key
    key = read_key(key_file) if section.key_file else read_or_make_key(key_file)
    deadline = time.monotonic() + section.start_timeout_s
    starter = _Starter(
        *(section, run_dir, model, dtype, key_file, key, host, routing), tuple(embedded_command)
    )
    server = starter.start(0, deadline, on_death)
    return Fleet([server.url], key, [server])


def _external(section: RolloutSection) -> Fleet:
    if section.key_file is None:
        accepted = "the file with the key of the servers in rollout.urls"
        raise ConfigError([Problem("rollout.key_file", "nothing", accepted)])
    key = read_key(section.key_file)
    deadline = time.monotonic() + section.start_timeout_s
    for url in section.urls:
        while (error := _probe(url, key, deadline)) is not None:
            if time.monotonic() >= deadline:
                raise ServerError(f"{error} (waited {section.start_timeout_s:g} s)")
            time.sleep(min(1.0, section.start_timeout_s / 10))
    return Fleet(section.urls, key, [])


class ManagedServer:
    """One child process with its group, its log and its watcher."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], log_file: Path, key: str
    ) -> None:
        self.name, self.process, self.log_file = name, process, log_file
        self.url = ""
        self._key = key
        self._stopping = False
        self._ended = threading.Event()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def watch(self, on_death: Callable[[ServerDeath], None]) -> None:
        """Reaps the process when it ends and, unless we ended it, reports why."""

        def wait() -> None:
            # Without reaping at first: until then nobody else can get its group's number.
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            self.signal_group(signal.SIGKILL)  # what it left behind
            self.process.wait()
            self._ended.set()
            if not self._stopping:
                death = ServerDeath(self.name, self.cause())
                log.error("%s", death)
                on_death(death)

        threading.Thread(target=wait, name=f"watch-{self.name}", daemon=True).start()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after three seconds, to the whole group."""
        self._stopping = True
        self.signal_group(signal.SIGTERM)
        if not self._ended.wait(_TERM_S):
            self.signal_group(signal.SIGKILL)
            self._ended.wait()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def signal_group(self, number: signal.Signals) -> None:
        if self._ended.is_set():
            return
        self._stopping = self._stopping or number == signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def cause(self) -> str:
        code = self.process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}; end of {self.log_file}:\n{self.tail()}"

    def tail(self) -> str:
        """The end of the log, without the key."""
        with self.log_file.open("rb") as file:
            file.seek(max(0, self.log_file.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").replace(self._key, "***").strip()


@dataclass(frozen=True)
class _Starter:
    section: RolloutSection
    run_dir: RunDir
    model: Path
    dtype: str
    key_file: Path
    key: str
    host: str
    routing: bool
    embedded_command: tuple[str, ...]

    def start(
        self, index: int, deadline: float, on_death: Callable[[ServerDeath], None]
    ) -> ManagedServer:
        """A server that answers. A port we chose may be taken meanwhile: then another one."""
        ready_file = self.run_dir.server(index)
        _clear_stale(ready_file)
        chooses_port = self.section.engine == "sglang" and self.section.port == 0
        for attempt in range(_PORT_TRIES):
            port = _free_port(self.host) if chooses_port else self.section.port
            server = self._spawn(index, port, ready_file, on_death)
            try:
                server.url = self._await(server, port, ready_file, deadline)
            except ServerError as error:
                server.stop()
                taken = "address already in use" in str(error).lower()
                if chooses_port and taken and attempt + 1 < _PORT_TRIES:
                    continue
                raise
            except BaseException:
                server.stop()
                raise
            if not server.running:  # too early for its watcher to have told anybody
                raise ServerError(f"{server.name} died: {server.cause()}")
            log.info("%s: %s, log %s", server.name, server.url, server.log_file)
            return server
        raise AssertionError("unreachable")

    def _spawn(
        self, index: int, port: int, ready_file: Path, on_death: Callable[[ServerDeath], None]
    ) -> ManagedServer:
        if self.section.engine == "embedded":
            command = self._embedded(port, ready_file)
        else:
            command = self._sglang(index, port)
        self.run_dir.logs.mkdir(parents=True, exist_ok=True)
        log_file = self.run_dir.logs / f"server_{index}.log"
        with _open_private(log_file) as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={k: v for k, v in os.environ.items() if not _NOT_INHERITED.fullmatch(k)},
            )
        server = ManagedServer(f"server {index}", process, log_file, self.key)

        def report(death: ServerDeath) -> None:
            if server.url:  # while it starts, `start` itself reports
                on_death(death)

        server.watch(report)
        return server

    def _embedded(self, port: int, ready_file: Path) -> list[str]:
        section = self.section
        options: dict[str, object] = {
            "host": self.host,
            "port": port,
            "key-file": self.key_file,
            "ready-file": ready_file,
            "max-running": section.max_running,
            "context-length": section.context_length,
            "dtype": self.dtype,
            "fp8": section.fp8,
            "parent-pid": os.getpid(),
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        shape = "--fixed-shape" if section.fixed_shape else "--no-fixed-shape"
        return [*self.embedded_command, str(self.model), *flags, shape]

    def _sglang(self, index: int, port: int) -> list[str]:
        """SGLang takes its key as an argument or from a YAML file: the file keeps it out of argv.
        It also logs its arguments, so it runs under the guard, which blacks the key out."""
        section = self.section
        if not section.server_command:
            accepted = "the command that starts SGLang, e.g. [python, -m, sglang.launch_server]"
            raise ConfigError([Problem("rollout.server_command", "nothing", accepted)])
        reserved = {"--config", "--api-key", "--admin-api-key", "--host", "--port", "--tp-size"}
        for argument in section.server_args:
            if argument.split("=")[0] in reserved:
                accepted = f"anything but {', '.join(sorted(reserved))}: these are set by the run"
                raise ConfigError([Problem("rollout.server_args", argument, accepted)])
        secrets_file = self.run_dir.root / f"server_{index}.key.yaml"
        with _open_private(secrets_file, "w") as file:
            file.write(json.dumps({"api-key": self.key}).encode())
        guard = [sys.executable, "-m", "megarl.rollout.guard", str(os.getpid()), str(self.key_file)]
        options: dict[str, object] = {
            "config": secrets_file,
            "model-path": self.model,
            "host": self.host,
            "port": port,
            "dtype": _SGLANG_DTYPES[self.dtype],
            "context-length": section.context_length,
            "tp-size": section.server_tp,
            "weight-version": 0,
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        flags += ["--enable-return-routed-experts"] * self.routing
        return [*guard, *section.server_command, *flags, *section.server_args]

    def _await(self, server: ManagedServer, port: int, ready_file: Path, deadline: float) -> str:
        """The server's URL once it answers. Raises ServerError when it ends first or takes too
        long."""
        managed_url = f"http://{self.host}:{port}"
        next_probe = 0.0
        while True:
            if not server.running:
                raise ServerError(f"{server.name} did not start: {server.cause()}")
            if time.monotonic() > deadline:
                waited = f"{self.section.start_timeout_s:g} s (rollout.start_timeout_s)"
                raise ServerError(
                    f"{server.name} was not ready within {waited}; end of {server.log_file}:\n"
                    f"{server.tail()}"
                )
            if self.section.engine == "embedded" and ready_file.exists():
                return str(json.loads(ready_file.read_text())["url"])
            if self.section.engine == "sglang" and time.monotonic() >= next_probe:
                if _probe(managed_url, self.key, deadline) is None:
                    ready = {
                        "url": managed_url,
                        "pid": server.process.pid,
                        "host": socket.gethostname(),
                    }
                    write_json(ready_file, ready)
                    return managed_url
                next_probe = time.monotonic() + 1.0
            server.wait(_POLL_S)


def _probe(url: str, key: str, deadline: float) -> ServerError | None:
    """None if the server generates a token; else why not."""

    async def ask() -> None:
        client = RolloutClient(url, key, 1.0)
        try:
            await client.health(max(1.0, min(20.0, deadline - time.monotonic())))
        finally:
            await client.close()

    try:
        asyncio.run(ask())
    except ServerError as error:
        return error
    return None


def _clear_stale(ready_file: Path) -> None:
    """A file of an earlier run is removed; a server that still runs under it is an error."""
    if not ready_file.exists():
        return
    try:
        stale = json.loads(ready_file.read_text())
        pid, host = int(stale["pid"]), str(stale["host"])
    except (ValueError, KeyError, TypeError):
        pid, host = 0, ""
    if host == socket.gethostname() and pid > 0 and lives(pid) and _is_server(pid):
        raise ServerError(f"{ready_file} names a server that still runs (pid {pid}); end it first")
    log.warning("%s is of an earlier run (pid %d on %s); removed", ready_file, pid, host)
    ready_file.unlink()


def _is_server(pid: int) -> bool:
    """Whether a process looks like one of ours: numbers are used again."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(b"serve" in word or b"megarl" in word or b"sglang" in word for word in words)


def _free_port(host: str) -> int:
    """Outside the range the system hands out itself: SGLang binds it half a minute later."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port


def _open_private(path: Path, mode: str = "a") -> IO[bytes]:
    """A file for its owner's eyes: what a server logs may tell more than it should."""
    kind = os.O_APPEND if mode == "a" else os.O_TRUNC
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | kind, 0o600), "wb")
