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
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from megarl.errors import ServerError
from megarl.rollout import router_start
from megarl.rollout.control import new_session
from megarl.rollout.managed import ManagedServer, spawn
from megarl.rollout.starter import free_port
from megarl.rundir import RunDir
from megarl.types import Member

log = logging.getLogger(__name__)

NAME = "router"
_CALL_S = 10.0
_POLL_S = 0.1
_OPTIONS = (
    *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
    *("--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"),
    *("--log-level", "warn"),
)


class Router:
    """One router process and the workers it has. Not for several threads at once."""

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
    ) -> None:
        """``command``: PROGRAM -m MODULE..., ``rollout.router_command``. ``timeout_s``: until it
        answers, or has taken a worker. Raises ServerError.
        """
        self._command, self._run_dir, self._host = tuple(command), run_dir, host
        self._key, self._key_file = key, key_file
        self._timeout_s, self._request_timeout_s = timeout_s, request_timeout_s
        self._restarts_left, self._say = max_restarts, say
        self._headers = {"Authorization": f"Bearer {key}"}
        self._server, self._member = self._start()

    def member(self) -> Member:
        """Whom collectors ask instead of the servers. Another boot after a restart."""
        return self._member

    def serve(self, members: Sequence[Member]) -> None:
        """These servers, and no others, are asked from now on. A router that has died is started
        again first, as often as it may be. Raises ServerError.
        """
        if not self._server.running:
            cause = self._server.cause()
            if not self._restarts_left:
                raise ServerError(f"{NAME} died: {cause}")
            self._restarts_left -= 1
            log.error("%s died: %s; started again, %d left", NAME, cause, self._restarts_left)
            self._server, self._member = self._start()
        asyncio.run(self._serve({member.url for member in members}))

    def close(self) -> None:
        self._server.stop()

    def _start(self) -> tuple[ManagedServer, Member]:
        port, metrics_port = free_port(self._host), free_port(self._host)
        program, *rest = self._command
        command = [
            *(sys.executable, "-m", "megarl.rollout.guard", str(os.getpid()), str(self._key_file)),
            *(program, router_start.__file__, str(self._key_file), *rest),
            *("--host", self._host, "--port", str(port)),
            *("--prometheus-host", self._host, "--prometheus-port", str(metrics_port)),
            *("--request-timeout-secs", str(int(self._request_timeout_s) + 1)),
            *_OPTIONS,
        ]
        server = spawn(NAME, command, self._run_dir.logs / f"{NAME}.log", self._key, "start")
        server.watch(lambda: None)
        url = f"http://{self._host}:{port}"
        deadline = time.monotonic() + self._timeout_s
        while not asyncio.run(self._answers(url)):
            late = time.monotonic() > deadline
            if late or not server.running:
                why = f"was not ready within {self._timeout_s:g} s" if late else "did not start"
                words = server.last_words() if server.running else server.cause()
                server.signal_group(signal.SIGKILL)
                raise ServerError(f"{NAME} {why} (rollout.router_command): {words}")
            server.wait(_POLL_S)
        self._say(f"{NAME}: {url}, log {server.log_file}")
        return server, Member(NAME, url, uuid.uuid4().hex[:12], version="sglang-router")

    async def _serve(self, wanted: set[str]) -> None:
        url = self._member.url
        try:
            async with asyncio.timeout(self._timeout_s), new_session(self._headers) as session:
                there = await self._workers(session, url)
                for gone in there.keys() - wanted:
                    await self._call(session, "DELETE", f"{url}/workers/{there[gone]}")
                for new in wanted - there.keys():
                    body = {"url": new, "worker_type": "regular", "api_key": self._key}
                    await self._call(session, "POST", f"{url}/workers", body)
                while (await self._workers(session, url)).keys() != wanted:  # it takes its time
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise ServerError(
                f"{NAME}: has not taken {sorted(wanted)} for its workers within "
                f"{self._timeout_s:g} s; {self._server.last_words()}"
            ) from error
        except aiohttp.ClientError as error:
            raise ServerError(f"{NAME}: {error or type(error).__name__}") from error

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

    async def _answers(self, url: str) -> bool:
        try:
            async with new_session(self._headers) as session:
                return bool(await self._workers(session, url) is not None)
        except (ServerError, aiohttp.ClientError, TimeoutError):
            return False
