"""Real embedded servers for tests of weight pushes, alone or behind a proxy that lies for them."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from megarl.config.rollout import RolloutSection
from megarl.ops import digest_partial_ref, finish
from megarl.rollout.fleet import ServerDeath, start_fleet
from megarl.rundir import RunDir


def http(url: str, key: str, path: str, body: Any = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
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
    url: str
    key: str
    pid: int
    deaths: list[ServerDeath]

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
    deaths: list[ServerDeath] = []
    run = RunDir(folder)
    section = RolloutSection(max_running=max_running, context_length=32)
    fleet = start_fleet(section, run_dir=run, model=model, dtype="fp32", on_death=deaths.append)
    try:
        pid = json.loads(run.server(0).read_text())["pid"]
        yield Server(fleet.urls[0], fleet.key, pid, deaths)
    finally:
        fleet.close()


Rewrite = Callable[[int, Any], tuple[int, Any]]


@dataclass
class Proxy:
    """Stands before a real server; its first answer on a path is rewritten, or made up."""

    target: Server
    path: str
    rewrite: Rewrite
    forward: bool
    url: str = ""
    pending: bool = True

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        rewritten = path == self.path and self.pending
        self.pending = self.pending and not rewritten
        if rewritten and not self.forward:
            return self.rewrite(200, {})
        status, reply = http(self.target.url, self.target.key, path, body)
        return self.rewrite(status, reply) if rewritten else (status, reply)


@contextmanager
def proxied(
    server: Server, path: str, rewrite: Rewrite, *, forward: bool = True
) -> Iterator[Proxy]:
    proxy = Proxy(server, path, rewrite, forward)

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
