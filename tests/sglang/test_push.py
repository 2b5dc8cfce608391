"""Pushes to a real SGLang server and an embedded one together, of which one dies or hangs."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.control import ServerControl
from megarl.rollout.probe import Probe
from megarl.sync.group import create_store, join_group, leave_group
from megarl.types import Push
from tests.helpers.dist import WorkerPool
from tests.sglang.conftest import Models
from tests.sglang.contract import (
    TOLERANCE,
    Reference,
    exact_in_place,
    logprobs_of,
    pushed,
    running,
)
from tests.sglang.protocol import PROMPT, generate, ok
from tests.sglang.server import Endpoint, SGLangServer, require_sglang
from tests.sync.servers import Proxy, Server, digests_of, proxied, several
from tests.sync.watched import Blow

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.timeout(1500)]


@pytest.fixture
def beside(tiny_models: Models, tmp_path: Path) -> Iterator[Server]:
    with several(tiny_models.a, tmp_path / "run", 1) as [server]:
        yield server


def described(server: Endpoint) -> dict[str, Any]:
    """One that has to prove itself to every trainer."""
    version = Probe(server.url, server.key).identity().version
    about = {"name": "sglang", "boot": "1", "version": version}
    return {"url": server.url, "key": server.key, **about}


def push(
    pool: WorkerPool,
    models: Models,
    servers: list[dict[str, Any]],
    *whom: list[int],
    **options: Any,
) -> list[Push]:
    """Versions 101, 102, ... of models b, a, b, ..."""
    files = [m / "model.safetensors" for m in (models.b, models.a)]
    pushes = [(101 + k, files[k % 2], indices) for k, indices in enumerate(whom)]
    work = "tests.sync.work_push:push"
    [rank] = pool.run(work, world=1, stages=1, servers=servers, pushes=pushes, **options)
    assert [error for error, *_ in rank["steps"]] == [None] * len(whom)
    return [step[1] for step in rank["steps"]]


def serves(server: Endpoint, model: Path, version: int) -> None:
    control = ServerControl(server.url, server.key)
    assert control.control("digest", {}, 30)["digests"] == digests_of(model)
    assert generate(server, num_tokens=2)["meta_info"]["weight_version"] == str(version)


class Comparing(Proxy):
    """The first proof fails at its end. ``compared``: how many have come there."""

    compared = 0

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        status, reply = super().answer(path, body)
        if (body or {}).get("action") == "digest_compare":
            self.compared += 1
            if self.compared == 1:
                reply["ranks"][0]["checksums"] = {"megarl:error": "torn"}
        return status, reply


def scheduler_of(server: SGLangServer) -> int:
    """The process that computes, of those that the server consists of."""
    assert server._process is not None
    parents = {
        int(path.name): int((path / "stat").read_text().rpartition(")")[2].split()[1])
        for path in Path("/proc").glob("[0-9]*")
        if (path / "stat").exists()
    }

    def is_ours(pid: int) -> bool:
        return pid == server._process.pid or (pid in parents and is_ours(parents[pid]))

    [pid] = [
        pid
        for pid in parents
        if is_ours(pid) and b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def test_an_embedded_server_killed_in_the_middle_does_not_disturb_sglang(
    pool: WorkerPool, sglang_server: SGLangServer, tiny_models: Models, beside: Server
) -> None:
    servers = [beside.described, described(sglang_server)]
    blows = {str(beside.pid): Blow("receive", 0, beside.pid, later_s=0.3)}
    pushes = push(pool, tiny_models, servers, [0, 1], [1], blows=blows)
    assert [set(p.lost) for p in pushes] == [{beside.name}, set()]
    assert [p.receipt and p.receipt.version for p in pushes] == [101, 102]
    serves(sglang_server, tiny_models.a, 102)


def test_sglang_that_hangs_in_the_middle_does_not_disturb_the_embedded_server(
    pool: WorkerPool, sglang_server: SGLangServer, tiny_models: Models, beside: Server
) -> None:
    """Its HTTP side lives, its scheduler stands still; when that goes on, so does the next push."""
    pid = scheduler_of(sglang_server)
    servers = [beside.described, described(sglang_server)]
    hang = {"blows": {"1": Blow("receive", 0, pid, signal.SIGSTOP)}, "deadline_s": 4.0}
    try:
        [first] = push(pool, tiny_models, servers, [0, 1], **hang)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert set(first.lost) == {"sglang"} and "within 4 s" in first.lost["sglang"]
    assert beside.digests() == digests_of(tiny_models.b) and beside.version() == "101"
    [second] = push(pool, tiny_models, servers, [0, 1])
    assert second.lost == {}
    serves(sglang_server, tiny_models.b, 101)


def test_who_cannot_prove_itself_is_lost_alone_and_proves_itself_in_the_next_push(
    pool: WorkerPool, sglang_server: SGLangServer, tiny_models: Models, beside: Server
) -> None:
    """The first push, the proof and the next one: the server gets everything four times."""
    real = Server("sglang", sglang_server.url, sglang_server.key, 0, multiprocessing.Process())
    with proxied(real, "", kind=Comparing) as proxy:
        assert isinstance(proxy, Comparing)
        servers = [beside.described, {**described(sglang_server), "url": proxy.url}]
        first, second, third = push(pool, tiny_models, servers, [0, 1], [0, 1], [0, 1])
    assert first.lost == {"sglang": "sglang: rank 0: torn"} and first.receipt is not None
    assert (second.lost, third.lost, proxy.compared) == ({}, {}, 2)
    received = proxy.paths.count("/update_weights_from_distributed")
    assert second.receipt and third.receipt and received == 2 + 2 + 1
    assert (second.receipt.calls, third.receipt.calls) == (2, 1)
    serves(sglang_server, tiny_models.b, 103)


def test_groups_of_a_trainer_that_was_killed_are_left_when_the_next_one_comes(
    sglang_server: SGLangServer,
) -> None:
    """Those of the same trainer are not, nor others'."""
    names = ["megarl-one-rank0-1", "megarl-one-rank1-1", "others", "megarl-two-rank0-1"]
    mine = []
    with ThreadPoolExecutor(1) as background:
        for name in names:
            store, port = create_store("127.0.0.1")
            how = {"world_size": 2, "group_name": name, "backend": "gloo"}
            place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
            path = "/init_weights_update_group"
            joining = background.submit(ok, sglang_server, path, **place, **how)
            mine.append(join_group(store, rank=0, timeout_s=30.0, **how))
            joining.result()
    left = [
        sglang_server.post("/destroy_weights_update_group", {"group_name": name})[0]
        for name in names
    ]
    for group in mine:
        leave_group(group)
    assert left == [400, 400, 200, 200]


@pytest.mark.slow
def test_a_push_in_place_and_then_sglang_is_killed_in_the_middle_of_one(
    pool: WorkerPool,
    tiny_models: Models,
    reference: Reference,
    beside: Server,
    tmp_path: Path,
) -> None:
    """In place without overlapping steps, spans are exact to the token; without a cache of prefixes
    new requests have keys of the new weights alone, though one of the old is still running.
    """
    require_sglang()
    server = SGLangServer(
        tiny_models.a,
        log_path=tmp_path / "server.log",
        extra_args=("--disable-overlap-schedule", "--disable-radix-cache"),
    )
    with server, ThreadPoolExecutor(4) as background:
        ok(server, "/update_weight_version", new_version="a")
        future = running(server, background, return_routed_experts=True)
        pushed(server, background, tiny_models.b, "in_place")
        fresh = generate(server, num_tokens=8)
        exact_in_place(future.result(60), tiny_models, reference)
        expected = reference(tiny_models.b, PROMPT + fresh["output_ids"])["logprobs"]
        assert logprobs_of(fresh) == pytest.approx(expected[len(PROMPT) - 1 :], abs=TOLERANCE)

        pid = scheduler_of(server)
        servers = [beside.described, described(server)]
        blows = {"1": Blow("receive", 0, pid, later_s=0.5)}
        [done] = push(pool, tiny_models, servers, [0, 1], blows=blows)
        assert set(done.lost) == {"sglang"}
        assert beside.digests() == digests_of(tiny_models.b) and beside.version() == "101"
