"""Starts, asks and ends the real SGLang server on CPU, for tests.

with SGLangServer(model_path, log_path=tmp_path / "server.log") as server:
    status, reply = server.post("/generate", {"input_ids": [5, 6], ...})
"""

import json
import os
import random
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
INSTALL = HERE / "install.sh"
SUPPORT = HERE / "support"
PLUGIN = HERE.parents[1] / "megarl" / "sync" / "sglang_plugin"
VENV = Path(os.environ.get("MEGARL_SGLANG_VENV", HERE.parents[1] / ".venv-sglang"))

# No proxy between a test and its own machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerDidNotStart(RuntimeError):
    """The server ended or was not ready in time; carries the end of its log."""


def require_sglang() -> Path:
    """The environment with SGLang, installed first where it is missing (two minutes).

    Skips the test where that fails, or fails it when MEGARL_REQUIRE_SGLANG=1.
    """
    env = {"PYTHON": sys.executable, **os.environ}
    done = subprocess.run([INSTALL, VENV], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = f"SGLang cannot be installed here: {(done.stderr or done.stdout).strip()}"
        if os.environ.get("MEGARL_REQUIRE_SGLANG") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return VENV


class Endpoint:
    """A server that speaks the protocol, wherever it comes from."""

    url: str
    key: str

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """POSTs JSON with the server's key; returns (status, decoded reply)."""
        return self.request("POST", path, {} if body is None else body, key=self.key)

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        key: str | None,
        timeout_s: float = 120.0,
    ) -> tuple[int, Any]:
        """(status, reply): decoded where it is JSON, else text. Errors of HTTP are not raised."""
        try:
            with self._open(method, path, body, key, timeout_s) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode(errors="replace")

    def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        key: str | None,
        timeout_s: float,
    ) -> Any:
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        return _OPENER.open(request, timeout=timeout_s)


class SGLangServer(Endpoint):
    """A server on loopback, behind an API key. Ends with the `with` block, or with this process."""

    def __init__(
        self,
        model_path: Path | str,
        *,
        log_path: Path,
        port: int | None = None,
        key: str | None = None,
        dtype: str = "float32",
        routed: bool = True,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        venv: Path = VENV,
        start_timeout_s: float = 600.0,
    ) -> None:
        """`port` and `key` default to a free one and a random one. `routed`: the model has experts,
        and replies say which (a model without ends a server that is to say it). `extra_args` are
        SGLang's own flags and win over those set here; `env` likewise."""
        self.model_path = str(model_path)
        self.port = port or _free_port()
        self.key = key or secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._command = [
            str(venv / "bin" / "python"),
            *("-m", "sglang.launch_server", "--model-path", self.model_path),
            *("--host", "127.0.0.1", "--port", str(self.port), "--api-key", self.key),
            *("--device", "cpu", "--dtype", dtype, "--skip-tokenizer-init"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--cuda-graph-backend-decode", "disabled"),
            *("--cuda-graph-backend-prefill", "disabled"),
            *("--max-total-tokens", "4096", "--max-running-requests", "8"),
            *(("--enable-return-routed-experts",) if routed else ()),
            "--skip-server-warmup",
            "--sleep-on-idle",  # an idle scheduler would spin on a core the other tests need
            *extra_args,
        ]
        self._env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{SUPPORT}{os.pathsep}{PLUGIN}",
            **(env or {}),
        }
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "SGLangServer":
        """Returns once the server answers `/health_generate`. Raises ServerDidNotStart."""
        supervised = [sys.executable, str(SUPPORT / "supervise.py"), str(os.getpid())]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                supervised + self._command,
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the tests; the server ends with them
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends the server and all its processes. Does nothing the second time."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=30)

    def __enter__(self) -> "SGLangServer":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        while self._process.poll() is None:
            try:
                status, _ = self.request("GET", "/health_generate", key=self.key, timeout_s=30)
            except OSError:  # not listening yet
                status = 0
            if status == 200:
                return
            if time.monotonic() > deadline:
                raise ServerDidNotStart(
                    f"SGLang at {self.url} was not ready within {self._start_timeout_s:g} s "
                    f"(/health_generate: {status}); the end of {self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(0.25)
        raise ServerDidNotStart(
            f"SGLang ended with status {self._process.returncode} while starting; the end of "
            f"{self.log_path}:\n{self.log_tail()}"
        )


def _free_port() -> int:
    """A port below the range that the system hands out by itself: the server binds it only half a
    minute later, and other tests open many sockets meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
