"""Weights of real actors reach a real server bit for bit, or the push fails on every rank, in time.

What a server must hold afterwards is read from the files the actor was loaded from, with digests
computed here: neither the actor's export nor the server's own account is taken on trust.
"""

import hashlib
import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.schema import RolloutSection
from megarl.rollout.fleet import ServerDeath, start_fleet
from megarl.rundir import RunDir
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

HUGE = 2**30
BOUND_S = 15.0  # of a failure; the operations' own deadline is 60 s unless a test sets it


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
    """Of the weights in a Hugging Face folder."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        head = f"{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape)}|".encode()
        found[name] = hashlib.sha256(head + tensor.numpy().tobytes()).hexdigest()
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
def started(model: Path, folder: Path) -> Iterator[Server]:
    deaths: list[ServerDeath] = []
    run = RunDir(folder)
    section = RolloutSection(max_running=2, context_length=32)
    fleet = start_fleet(section, run_dir=run, model=model, dtype="fp32", on_death=deaths.append)
    try:
        pid = json.loads(run.server(0).read_text())["pid"]
        yield Server(fleet.urls[0], fleet.key, pid, deaths)
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tiny_model, tmp_path_factory.mktemp("run")) as server:
        yield server
        assert server.deaths == []


@pytest.fixture
def server(served: Server, tiny_model: Path) -> Server:
    served.reload(tiny_model)
    assert served.digests() == digests_of(tiny_model)
    return served


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights, every one of them."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "model.safetensors"
    random = torch.Generator().manual_seed(11)
    tensors = {
        name: t + 0.01 * torch.randn(t.shape, generator=random)
        for name, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    old, new = digests_of(tiny_model), digests_of(folder)
    assert not any(old[name] == new[name] for name in new)
    return folder


def push(pool: WorkerPool, layout: dict[str, int], **arguments: Any) -> list[dict[str, Any]]:
    """Every rank's account of it."""
    world = mesh_of(layout).world_size
    work = "tests.sync.work_broadcast:push"
    return pool.run(work, world=world, layout=layout, **{"versions": [7], **arguments})


def failures(ranks: list[dict[str, Any]], step: int) -> list[str]:
    """The texts of a step that failed on every rank, and in bounded time."""
    outcomes = [rank["steps"][step] for rank in ranks]
    assert all(error is not None and receipt is None for error, receipt, _ in outcomes), outcomes
    assert max(seconds for *_, seconds in outcomes) < BOUND_S
    # the rank where it happened has its own error, the others one that names it
    kinds = [error[0] for error, *_ in outcomes]
    assert kinds.count("RunError") == len(kinds) - 1
    assert set(kinds) - {"RunError"} <= {"ServerError", "SyncError"}
    return [error[1] for error, *_ in outcomes]


# --- whole pushes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "max_bytes"),
    [
        ({"dp": 2, "ep": 2}, 100_000),
        ({"tp": 2}, 1),  # every tensor is larger than a bucket and travels alone
        ({"pp": 2}, 100_000),  # two senders, a group each
        ({}, HUGE),  # everything in one bucket
    ],
    ids=str,
)
def test_every_weight_arrives_bit_for_bit(
    pool: WorkerPool, server: Server, other_model: Path, layout: dict[str, int], max_bytes: int
) -> None:
    before = server.generate()[1]["meta_info"]["weight_version"]
    ranks = push(pool, layout, hf=other_model, url=server.url, key=server.key, max_bytes=max_bytes)
    expected = digests_of(other_model)
    assert server.digests() == expected

    assert [error for rank in ranks for error, *_ in rank["steps"]] == [None] * 2 * len(ranks)
    receipts = [rank["steps"][1][1] for rank in ranks]
    assert receipts[1:] == [None] * (len(ranks) - 1)
    lines = "".join(f"{name} {expected[name]}\n" for name in sorted(expected))
    assert receipts[0].digest == hashlib.sha256(lines.encode()).hexdigest()
    assert (receipts[0].version, receipts[0].tensors) == (7, len(expected))
    file = load_file(other_model / "model.safetensors")
    assert receipts[0].num_bytes == sum(t.nbytes for t in file.values())

    operations = [seen for rank in ranks for seen in rank["seen"]]
    assert {(b, a) for op, b, a in operations if op != "commit"} == {("0", "0")}
    assert [(b, a) for op, b, a in operations if op == "commit"] == [("0", "7")]
    received = [op for op, *_ in operations].count("receive")
    assert received == {1: len(expected), HUGE: 1}.get(max_bytes, received)
    assert received > 1 or max_bytes == HUGE
    status, reply = server.generate()
    assert (before, status, reply["meta_info"]["weight_version"]) == ("0", 200, "7")


def test_one_connection_serves_many_pushes(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    ranks = push(
        pool, {"dp": 2}, hf=other_model, url=server.url, key=server.key, versions=[1, 2, 5]
    )
    assert [error for rank in ranks for error, *_ in rank["steps"]] == [None] * 8
    assert [after for op, _, after in ranks[0]["seen"] if op == "commit"] == ["1", "2", "5"]
    assert server.digests() == digests_of(other_model)


# --- failed pushes --------------------------------------------------------------------------------

Rewrite = Callable[[int, Any], tuple[int, Any]]


@dataclass
class Proxy:
    """Stands before a real server; what it answers on a path may be rewritten, ``times`` times."""

    target: Server
    path: str
    rewrite: Rewrite
    times: int = 1
    url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, reply = http(self.target.url, self.target.key, path, body)
        with self._lock:
            if path == self.path and self.times:
                self.times -= 1
                return self.rewrite(status, reply)
        return status, reply


@contextmanager
def proxied(server: Server, path: str, rewrite: Rewrite) -> Iterator[Proxy]:
    proxy = Proxy(server, path, rewrite)

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


def no_success(status: int, reply: Any) -> tuple[int, Any]:
    return 200, {"success": False, "message": "weights are half written"}


def one_bit_wrong(status: int, reply: Any) -> tuple[int, Any]:
    name = "model.norm.weight"
    digest = reply["digests"][name]
    changed = f"{int(digest[0], 16) ^ 1:x}{digest[1:]}"
    return status, {**reply, "digests": {**reply["digests"], name: changed}}


def one_missing(status: int, reply: Any) -> tuple[int, Any]:
    kept = {n: d for n, d in reply["digests"].items() if n != "model.norm.weight"}
    return status, {**reply, "digests": {**kept, "model.ghost.weight": "0" * 64}}


@pytest.mark.parametrize(
    "path", ["/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"]
)
def test_a_server_that_answers_200_without_success_fails_the_push_on_every_rank(
    pool: WorkerPool, server: Server, other_model: Path, path: str
) -> None:
    with proxied(server, path, no_success) as proxy:
        ranks = push(pool, {"dp": 2}, hf=other_model, url=proxy.url, key=server.key)
    for text in failures(ranks, 1):
        assert "half written" in text and path in text
    assert server.version() == "0"


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        (one_bit_wrong, ["1 differ", "model.norm.weight", "0 missing", "0 more"]),
        (one_missing, ["0 differ", "1 missing", "model.norm.weight", "1 more", "model.ghost"]),
    ],
)
def test_a_server_that_holds_other_weights_fails_the_push_and_the_next_one_mends_it(
    pool: WorkerPool,
    server: Server,
    other_model: Path,
    layout: dict[str, int],
    rewrite: Rewrite,
    words: list[str],
) -> None:
    with proxied(server, "/weights_checker", rewrite) as proxy:
        ranks = push(pool, layout, hf=other_model, url=proxy.url, key=server.key, versions=[7, 8])
    for text in failures(ranks, 1):
        assert all(word in text for word in words), text
    assert [error for rank in ranks for error, *_ in rank["steps"][2:]] == [None] * len(ranks)
    operations = ranks[0]["seen"]
    assert [(b, a) for op, b, a in operations if op == "commit"] == [("0", "8")]  # never 7
    assert server.version() == "8"
    assert server.digests() == digests_of(other_model)


def test_weights_that_the_server_cannot_take_are_refused_at_once_on_every_rank(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    """bfloat16 for a float32 model: the broadcast that nobody receives is not waited for."""
    ranks = push(pool, {"dp": 2}, hf=other_model, url=server.url, key=server.key, dtype="bf16")
    for text in failures(ranks, 1):
        assert "bfloat16" in text and "float32" in text
    assert server.version() == "0"


@pytest.mark.parametrize("kill", [("receive", 1), ("digest", 0)], ids=str)
def test_a_server_that_dies_during_a_push_fails_it_on_every_rank(
    pool: WorkerPool, tiny_model: Path, other_model: Path, tmp_path: Path, kill: tuple[str, int]
) -> None:
    """Killed between ``begin`` and ``commit``: while weights arrive, and when all have arrived."""
    with started(tiny_model, tmp_path / "run") as server:
        ranks = push(
            pool,
            {"pp": 2},
            hf=other_model,
            url=server.url,
            key=server.key,
            max_bytes=100_000,
            kill=(*kill, server.pid),
        )
        for text in failures(ranks, 1):
            assert server.url in text
        assert ("commit",) not in [seen[:1] for rank in ranks for seen in rank["seen"]]


def test_a_server_that_is_not_there_fails_the_connection_on_every_rank(
    pool: WorkerPool, other_model: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ranks = push(pool, {"dp": 2}, hf=other_model, url=url, key="k", timeout_s=2.0)
    for text in failures(ranks, 0):
        assert "megarl-stage0" in text


def test_a_server_that_refuses_to_join_fails_the_connection_on_every_rank(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    with proxied(server, "/init_weights_update_group", no_success) as proxy:
        ranks = push(pool, {"dp": 2}, hf=other_model, url=proxy.url, key=server.key)
    for text in failures(ranks, 0):
        assert "half written" in text
