"""Real embedded servers for tests of weight pushes, alone or behind a proxy that lies for them."""

import functools
import json
import multiprocessing
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megarl.ops import digest_partial_ref, finish
from megarl.rollout.process import read_or_make_key

_FORKS = multiprocessing.get_context("forkserver")


def http(url: str, key: str, path: str, body: Any = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, raw, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def digests_of(folder: Path) -> dict[str, str]:
    """Of the weights in a Hugging Face folder, by the definition in plain torch."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        partial = digest_partial_ref(tensor, tensor.shape, [0] * tensor.dim())
        found[name] = finish(partial, tensor.dtype, tensor.shape)
    return found


@dataclass
class Server:
    name: str
    url: str
    key: str
    pid: int
    process: BaseProcess

    @property
    def described(self) -> dict[str, Any]:
        """What the ranks of a test need to know of it."""
        return {"name": self.name, "url": self.url, "key": self.key, "boot": str(self.pid)}

    def digests(self) -> dict[str, str]:
        status, reply = http(self.url, self.key, "/weights_checker", {"action": "digest"})
        assert status == 200, reply
        return reply["digests"]

    def version(self) -> str:
        return http(self.url, self.key, "/server_info")[1]["weight_version"]

    def generate(self) -> tuple[int, Any]:
        sampling = {"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": [9, 16, 11], "sampling_params": sampling, "return_logprob": True}
        return http(self.url, self.key, "/generate", body)

    def reload(self, model: Path) -> None:
        """Back to the weights it was started with, as version 0."""
        body = {"model_path": str(model), "weight_version": "0"}
        http(self.url, self.key, "/end_weight_update", {})
        status, reply = http(self.url, self.key, "/update_weights_from_disk", body)
        assert status == 200, reply
        http(self.url, self.key, "/continue_generation", {})


@contextmanager
def started(model: Path, folder: Path, max_running: int = 2) -> Iterator[Server]:
    """A server process of its own; ends with the block, or with this process."""
    with several(model, folder, 1, max_running) as servers:
        yield servers[0]


@contextmanager
def several(
    model: Path,
    folder: Path,
    count: int,
    max_running: int = 2,
    context_length: int = 32,
    dtype: str = "fp32",
) -> Iterator[list[Server]]:
    """Forked from a process that has imported everything already."""
    _FORKS.set_forkserver_preload(["megarl.serve", "transformers.models.qwen3_moe"])
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "server.key"
    read_or_make_key(key)
    processes = []
    try:
        for k in range(count):
            options = {"key_file": key, "ready_file": folder / f"server_{k}.json"}
            options |= {"max_running": max_running, "context_length": context_length}
            options["dtype"] = dtype
            log = folder / f"server_{k}.log"
            target = functools.partial(_serve, log, model, parent_pid=os.getpid(), **options)
            processes.append(_FORKS.Process(target=target, daemon=True))
            processes[-1].start()
        servers = []
        for k, process in enumerate(processes):
            url = _ready(folder / f"server_{k}.json", folder / f"server_{k}.log", process)
            assert process.pid is not None
            servers.append(Server(f"server {k}", url, key.read_text(), process.pid, process))
        yield servers
    finally:
        for process in processes:
            process.kill()  # one that is stopped does not see SIGTERM
        for process in processes:
            process.join()


def _serve(log: Path, model: Path, **options: Any) -> None:
    from megarl.serve import main

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    main(model, **options)


def _ready(file: Path, log: Path, process: Any) -> str:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline and process.is_alive(), log.read_text()
        time.sleep(0.02)
    url: str = json.loads(file.read_text())["url"]
    return url


Rewrite = Callable[[int, Any], tuple[int, Any]]
Forge = Callable[[dict[str, Any]], dict[str, Any]]


def unchanged(status: int, reply: Any) -> tuple[int, Any]:
    return status, reply


@dataclass
class Proxy:
    """Stands before a real server; its first ``times`` answers on a path are rewritten, or made
    up for the nth where that is not ``forward``-ed, or what is asked there is forged. ``paths``:
    what was asked, in order.
    """

    target: Server
    path: str
    rewrite: Rewrite
    forward: Callable[[int], bool]
    times: int = 1
    forge: Forge = dict
    url: str = ""
    paths: list[str] = field(default_factory=list)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        nth = self.paths.count(path)
        self.paths.append(path)
        rewritten = path == self.path and self.times > 0
        self.times -= rewritten
        if rewritten and not self.forward(nth):
            return self.rewrite(200, {})
        body = self.forge(body) if rewritten and body is not None else body
        status, reply = http(self.target.url, self.target.key, path, body)
        return self.rewrite(status, reply) if rewritten else (status, reply)


@contextmanager
def proxied(
    server: Server,
    path: str,
    rewrite: Rewrite = unchanged,
    *,
    forward: bool | Callable[[int], bool] = True,
    times: int = 1,
    forge: Forge = dict,
    kind: type[Proxy] = Proxy,
) -> Iterator[Proxy]:
    passes = forward if callable(forward) else lambda nth: bool(forward)
    proxy = kind(server, path, rewrite, passes, times, forge)

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, reply = proxy.answer(self.path, body)
            raw = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = _reply

        def log_message(self, *args: Any) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
