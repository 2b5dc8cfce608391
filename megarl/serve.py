"""`megarl serve`: one process that holds a model, samples from it over HTTP, and takes new weights.

Here the embedded engine (rollout) meets the receiver of weights (sync). The process ends on SIGTERM
within two seconds and, when it was started by another (`parent_pid`), as soon as that one is gone; it
then leaves Ctrl-C to the parent, which gets it too. Nothing is written to stdout but one line.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import select
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from aiohttp import web

from megarl.errors import ConfigError, Problem
from megarl.rollout.embedded import Engine
from megarl.rollout.embedded_model import SlotModel
from megarl.rollout.server import build_app
from megarl.rundir import write_json
from megarl.sync.receiver import ModelReceiver

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_STOP_S = 1.5
_SWITCH_INTERVAL_S = (
    0.0005  # the engine takes the interpreter back from HTTP work hundreds of times a step
)


def main(
    model: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    key_file: Path | None = None,
    ready_file: Path | None = None,
    max_running: int = 256,
    context_length: int = 64,
    dtype: str = "fp32",
    fixed_shape: bool = True,
    parent_pid: int | None = None,
) -> int:
    """Serves until told to stop; returns the exit status. Raises ConfigError or DataError at the start.

    `key_file` is created with a fresh key if it does not exist (default: server.key beside
    `ready_file`, else in the working directory). `ready_file` gets {"url", "pid", "host"} once
    connections are accepted, and goes again at the end.
    """
    stop = threading.Event()
    _follow_parent(parent_pid, stop)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    key_file = key_file or (ready_file or Path("server")).with_name("server.key")
    key = read_or_make_key(key_file)
    slots = SlotModel(
        Path(model),
        num_slots=max_running,
        context_length=context_length,
        dtype=dtype,
        fixed_shape=fixed_shape,
    )
    engine = Engine(slots, ModelReceiver(slots.module))
    engine.start()
    listener = _listen(host, port)
    try:
        asyncio.run(_serve(engine, key, listener, ready_file, key_file, stop))
    finally:
        if ready_file is not None:
            Path(ready_file).unlink(missing_ok=True)
        engine.stop(timeout_s=0.2)
    return 0


async def _serve(
    engine: Engine,
    key: str,
    listener: socket.socket,
    ready_file: Path | None,
    key_file: Path,
    stop: threading.Event,
) -> None:
    """Accepts connections until a signal or `stop`, then ends what runs and leaves in bounded time."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, done.set)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGINT, done.set)
    runner = web.AppRunner(
        build_app(engine, key), access_log=None, handler_cancellation=True, shutdown_timeout=0.5
    )
    await runner.setup()
    await web.SockSite(runner, listener).start()
    url = _url(listener)
    if ready_file is not None:
        ready = {"url": url, "pid": os.getpid(), "host": socket.gethostname()}
        write_json(Path(ready_file), ready)
    sys.stdout.write(f"megarl serve: {url} serves {engine.model.folder} (key in {key_file})\n")
    sys.stdout.flush()
    watcher = loop.run_in_executor(None, _wait_for, stop, done.set, loop)
    await done.wait()
    stop.set()
    log.info("stopping")
    threading.Thread(target=_exit_after, args=(_STOP_S,), daemon=True).start()
    engine.stop(timeout_s=0.2)
    await runner.cleanup()
    await watcher


def read_or_make_key(path: Path) -> str:
    """The key in a file; a new one, for its owner only, where there is no file yet."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        log.warning("%s can be read by others; its mode should be 600", path)
    key = path.read_text().strip()
    if not key or not key.isascii() or any(c.isspace() for c in key):
        raise ConfigError([Problem("key file", str(path), "one line of ASCII without spaces")])
    return key


def _follow_parent(parent_pid: int | None, stop: threading.Event) -> None:
    """Managed: ignores Ctrl-C and ends when the parent does, by two means.

    The kernel signals the death of the *thread* that started us; so the signal only makes us look, and
    a watching thread covers what it misses (a parent that died before this line, or is no direct one).
    """
    if parent_pid is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def look(*_: object) -> None:
        if not _lives(parent_pid):
            stop.set()

    signal.signal(signal.SIGHUP, look)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)

    def watch() -> None:
        for _ in _ticks(parent_pid):
            if not _lives(parent_pid):
                break
        stop.set()
        _exit_after(_STOP_S + 0.5)  # also when the main thread is stuck in a long load

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _ticks(pid: int) -> Iterator[None]:
    """Yields every half second, and at once when the process ends (where the system can tell)."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        while True:
            yield
            time.sleep(_POLL_S)
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while True:
        yield
        poller.poll(_POLL_S * 1000)


def _lives(pid: int) -> bool:
    """Whether the process runs: a zombie that nobody has waited for is dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:  # no /proc
        with contextlib.suppress(PermissionError):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return False
        return True
    return state not in "ZX"


def _wait_for(
    stop: threading.Event, then: Callable[[], None], loop: asyncio.AbstractEventLoop
) -> None:
    stop.wait()
    with contextlib.suppress(RuntimeError):  # the loop is closed: stopped already
        loop.call_soon_threadsafe(then)


def _exit_after(seconds: float) -> None:
    """Whatever still hangs then (a collective that waits for a dead sender) must not keep us."""
    time.sleep(seconds)
    os._exit(0)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=1024)
    except OSError as error:
        accepted = f"an address of this machine and a free port, or port 0 ({error})"
        raise ConfigError([Problem("host, port", f"{host}, {port}", accepted)]) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
