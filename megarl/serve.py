"""`megarl serve`: one process that holds a model, samples from it over HTTP, and takes new weights.

Here the embedded engine (rollout) meets the receiver of weights (sync). The process ends on
SIGTERM within two seconds and, when it was started by another (`parent_pid`), as soon as that one
is gone; it then leaves Ctrl-C to the parent, which gets it too. Nothing is written to stdout but
one line.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import NoReturn

import torch

from megarl.errors import ConfigError, Problem
from megarl.rollout.embedded import Engine
from megarl.rollout.embedded_model import SlotModel
from megarl.rollout.process import follow_parent, read_or_make_key
from megarl.rollout.server import build_app, run_app
from megarl.rundir import write_json
from megarl.sync.receiver import ModelReceiver

log = logging.getLogger(__name__)

_STOP_S = 1.5
_SWITCH_INTERVAL_S = 0.0005  # hundreds of times a step the engine waits to get back from HTTP work


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
    fp8: str = "none",
    parent_pid: int | None = None,
) -> NoReturn:
    """Serves until told to stop, then ends the process (taking torch apart would take seconds).

    Raises ConfigError or DataError at the start.

    `key_file` is created with a fresh key if it does not exist (default: server.key beside
    `ready_file`, else in the working directory). `ready_file` gets {"url", "pid", "host"} once
    connections are accepted, and goes again at the end.
    """
    stop = Event()
    if parent_pid is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        follow_parent(parent_pid, lambda: _stop_soon(stop))
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
        fp8=fp8,
    )
    engine = Engine(slots, ModelReceiver(slots.weights))
    engine.start()
    listener = _listen(host, port)
    url = _url(listener)

    def started() -> None:
        if ready_file is not None:
            ready = {"url": url, "pid": os.getpid(), "host": socket.gethostname()}
            write_json(Path(ready_file), ready)
        sys.stdout.write(f"megarl serve: {url} serves {model} (key in {key_file})\n")
        sys.stdout.flush()

    try:
        asyncio.run(_serve(engine, key, listener, started, stop))
    finally:
        if ready_file is not None:
            Path(ready_file).unlink(missing_ok=True)
        engine.stop(timeout_s=0.2)
        logging.shutdown()
    os._exit(0)


async def _serve(
    engine: Engine, key: str, listener: socket.socket, started: Callable[[], None], stop: Event
) -> None:
    """Answers until a signal or `stop`, then ends what runs and leaves in bounded time."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, done.set)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGINT, done.set)
    watcher = loop.run_in_executor(None, _wait_for, stop, done.set, loop)

    def stopping() -> None:
        log.info("stopping")
        stop.set()
        threading.Thread(target=_exit_after, args=(_STOP_S,), daemon=True).start()
        engine.stop(timeout_s=0.2)

    try:
        await run_app(build_app(engine, key), listener, started, done, stopping)
    finally:
        stop.set()
    await watcher


def _wait_for(stop: Event, then: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    stop.wait()
    with contextlib.suppress(RuntimeError):  # the loop is closed: stopped already
        loop.call_soon_threadsafe(then)


def _stop_soon(stop: Event) -> None:
    stop.set()
    _exit_after(_STOP_S + 0.5)  # also when the main thread is stuck, in a long load for one


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
