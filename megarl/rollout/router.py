"""An sglang-router between collectors and servers: it chooses who answers a `/generate`.

It is started here and told of every server that may serve (`serve`); probes, pauses and weights go
to the servers themselves, since the router knows no such calls. What else is to be known of
sglang-router 0.3.2, as it was seen to behave:

1. One request carries one sequence: lists of ids or of sampling parameters are refused (422).
2. Fields that it does not know are dropped, among them those that ask for routed experts.
3. It asks a new worker's `/health` without a key, which SGLang answers and the embedded server does
   not.
4. Left alone it asks again by itself, and shuts out workers after failures; and its metrics listen
   on every interface. All that is switched off: a second attempt is the collector's to make, the
   fleet says who serves.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from megarl.errors import ServerError
from megarl.rollout import router_start
from megarl.rollout.control import new_session
from megarl.rollout.managed import ManagedServer, spawn
from megarl.rollout.routed import ROUTER
from megarl.rollout.starter import free_port
from megarl.rollout.watching import ServerDeath
from megarl.rundir import RunDir
from megarl.types import Member

log = logging.getLogger(__name__)

NAME = "router"
_CALL_S = 10.0
_TAKE_S = 30.0  # a worker that answers is taken in a second
_POLL_S = 0.1
_OPTIONS = (
    *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
    *("--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"),
    *("--log-level", "warn"),
)


class Router:
    """One router process and the workers it has. Safe to call from any thread."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        run_dir: RunDir,
        key: str,
        key_file: Path,
        host: str,
        timeout_s: float,
        request_timeout_s: float,
        max_restarts: int = 0,
        say: Callable[[str], None] = lambda text: None,
        report: Callable[[ServerDeath], None] = lambda death: None,
    ) -> None:
        """``command``: PROGRAM -m MODULE..., ``rollout.router_command``. ``timeout_s``: until it
        answers. ``report``: that it has died for good. Raises ServerError when it does not start.
        """
        self._command, self._run_dir, self._host = tuple(command), run_dir, host
        self._key, self._key_file = key, key_file
        self._timeout_s, self._request_timeout_s = timeout_s, request_timeout_s
        self._restarts_left, self._say, self._report = max_restarts, say, report
        self._headers = {"Authorization": f"Bearer {key}"}
        self._closed, self._lock = False, threading.RLock()
        self._wanted: set[str] = set()
        self._port, self._metrics_port = free_port(host), free_port(host)
        self.url = f"http://{host}:{self._port}"
        self._start("start")

    def member(self) -> Member:
        """Whom collectors ask instead of the servers, for good."""
        return Member(NAME, self.url, NAME, version=f"{ROUTER} 0.3.2")

    def serve(self, members: Sequence[Member]) -> None:
        """These servers, and no others, are asked from now on."""
        with self._lock:
            self._wanted = {member.url for member in members}
            if self._server.running:
                asyncio.run(self._serve(self._wanted))

    def close(self) -> None:
        self._closed = True
        self._server.stop()

    def _start(self, mark: str) -> None:
        program, *rest = self._command
        command = [
            *(sys.executable, "-m", "megarl.rollout.guard", str(os.getpid()), str(self._key_file)),
            *(program, router_start.__file__, str(self._key_file), *rest),
            *("--host", self._host, "--port", str(self._port)),
            *("--prometheus-host", self._host, "--prometheus-port", str(self._metrics_port)),
            *("--request-timeout-secs", str(int(self._request_timeout_s) + 1)),
            *_OPTIONS,
        ]
        server = spawn(NAME, command, self._run_dir.logs / f"{NAME}.log", self._key, mark)
        self._server, ready = server, threading.Event()
        server.watch(lambda: self._ended(server) if ready.is_set() else None)
        deadline = time.monotonic() + self._timeout_s
        while not asyncio.run(self._answers()):
            late = time.monotonic() > deadline
            if late or not server.running or self._closed:
                why = f"was not ready within {self._timeout_s:g} s" if late else "did not start"
                words = server.last_words() if server.running else server.cause()
                server.signal_group(signal.SIGKILL)
                raise ServerError(f"{NAME} {why} (rollout.router_command): {words}")
            server.wait(_POLL_S)
        ready.set()
        if self._wanted:
            asyncio.run(self._serve(self._wanted))
        self._say(f"{NAME}: {self.url}, log {server.log_file}")

    def _ended(self, server: ManagedServer) -> None:
        """In the watcher's thread: another one in its place, with the same workers."""
        with self._lock:
            if self._closed:
                return
            cause = server.cause()
            if self._restarts_left:
                self._restarts_left -= 1
                log.error("%s died: %s; started again, %d left", NAME, cause, self._restarts_left)
                try:
                    self._start("restart")
                    return
                except ServerError as error:
                    cause = str(error)
        if not self._closed:
            log.error("%s died: %s; not started again", NAME, cause)
            self._report(ServerDeath(NAME, cause))

    async def _serve(self, wanted: set[str]) -> None:
        """As far as it can be done: a worker that does not answer is the fleet's to find, and a
        router that has died is told anew.
        """
        url = self.url
        try:
            async with asyncio.timeout(_TAKE_S), new_session(self._headers) as session:
                there = await self._workers(session, url)
                for gone in there.keys() - wanted:
                    await self._call(session, "DELETE", f"{url}/workers/{there[gone]}")
                for new in wanted - there.keys():
                    body = {"url": new, "worker_type": "regular", "api_key": self._key}
                    await self._call(session, "POST", f"{url}/workers", body)
                while (await self._workers(session, url)).keys() != wanted:  # it takes its time
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            log.warning("%s: has not taken %s within %g s", NAME, sorted(wanted), _TAKE_S)
        except (aiohttp.ClientError, OSError, ServerError) as error:
            log.warning("%s: %s", NAME, error or type(error).__name__)

    async def _workers(self, session: aiohttp.ClientSession, url: str) -> dict[str, str]:
        """Ids by URL, of those that can be asked."""
        reply = await self._call(session, "GET", f"{url}/workers")
        return {w["url"]: w["id"] for w in reply["workers"] if w["is_healthy"]}

    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=_CALL_S)
        async with session.request(method, url, json=body, timeout=timeout) as response:
            if response.status not in (200, 202):
                text = await response.text()
                raise ServerError(f"{NAME}: {method} {url}: HTTP {response.status} {text[:200]}")
            return await response.json(content_type=None)

    async def _answers(self) -> bool:
        try:
            async with new_session(self._headers) as session:
                await self._workers(session, self.url)
                return True
        except (ServerError, aiohttp.ClientError, TimeoutError):
            return False
