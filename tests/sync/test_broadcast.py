"""Weights of real actors reach a real server bit for bit, or the push fails on every rank, in time.

What a server must hold afterwards is read from the files the actor was loaded from, with digests
computed here: neither the actor's export nor the server's own account is taken on trust.
"""

import hashlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.sync.servers import Rewrite, Server, digests_of, http, proxied, started

pytestmark = pytest.mark.dist

HUGE = 2**30
BOUND_S = 15.0  # of a failure; the operations' own deadline is 60 s unless a test sets it


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

    assert [error for rank in ranks for error, *_ in rank["steps"]] == [None] * 3 * len(ranks)
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
    assert [error for rank in ranks for error, *_ in rank["steps"]] == [None] * 10
    assert [after for op, _, after in ranks[0]["seen"] if op == "commit"] == ["1", "2", "5"]
    assert server.digests() == digests_of(other_model)


# --- failed pushes --------------------------------------------------------------------------------


def no_success(status: int, reply: Any) -> tuple[int, Any]:
    return 200, {"success": False, "message": "weights are half written"}


def one_bit_wrong(status: int, reply: Any) -> tuple[int, Any]:
    name = "model.norm.weight"
    digest = reply["digests"][name]
    changed = f"{int(digest[0], 16) ^ 1:x}{digest[1:]}"
    return status, {**reply, "digests": {**reply["digests"], name: changed}}


def one_missing(status: int, reply: Any) -> tuple[int, Any]:
    kept = {n: d for n, d in reply["digests"].items() if n != "model.norm.weight"}
    return status, {**reply, "digests": {**kept, "model.ghost.weight": "0" * 16}}


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
    state = http(server.url, server.key, "/server_info")[1]
    assert (state["weight_version"], state["paused"]) == ("0", "retract")  # samples nothing


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
    assert [error for rank in ranks for error, *_ in rank["steps"][2:]] == [None] * 4
    operations = ranks[0]["seen"]
    assert [(b, a) for op, b, a in operations if op == "commit"] == [("0", "8")]  # never 7
    assert server.version() == "8"
    assert server.digests() == digests_of(other_model)


REFUSAL_DEADLINE_S = 6.0


@pytest.fixture(scope="module")
def refused(
    pool: WorkerPool, served: Server, tiny_model: Path, other_model: Path
) -> list[dict[str, Any]]:
    """A push of bfloat16 weights to a float32 model."""
    served.reload(tiny_model)
    return push(
        pool,
        {"dp": 2},
        hf=other_model,
        url=served.url,
        key=served.key,
        dtype="bf16",
        deadline_s=REFUSAL_DEADLINE_S,
    )


def test_weights_that_the_server_cannot_take_are_refused_at_once_on_every_rank(
    refused: list[dict[str, Any]], served: Server
) -> None:
    """The broadcast that nobody receives is not waited for."""
    for text in failures(refused, 1):
        assert "bfloat16" in text and "float32" in text
    assert max(rank["steps"][1][2] for rank in refused) < REFUSAL_DEADLINE_S
    assert served.version() == "0"


def test_a_transport_whose_push_failed_closes_at_once(refused: list[dict[str, Any]]) -> None:
    assert max(rank["steps"][2][2] for rank in refused) < REFUSAL_DEADLINE_S / 2


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
    ranks = push(pool, {"dp": 2}, hf=other_model, url=url, key="k", deadline_s=2.0)
    for text in failures(ranks, 0):
        assert "join_group" in text and "Cannot connect" in text


def test_a_server_that_refuses_to_join_fails_the_connection_on_every_rank(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    path = "/init_weights_update_group"
    with proxied(server, path, no_success, forward=False) as proxy:
        ranks = push(pool, {"dp": 2}, hf=other_model, url=proxy.url, key=server.key, deadline_s=3.0)
    for text in failures(ranks, 0):
        assert "half written" in text


def test_a_server_can_be_joined_by_the_next_trainer(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    """As a server of ``rollout.urls`` is, when a run is resumed."""
    common = {"hf": other_model, "url": server.url, "key": server.key}
    first = push(pool, {}, versions=[], leave=False, **common)
    second = push(pool, {}, versions=[], leave=False, deadline_s=6.0, **common)
    assert [rank["steps"][0][0] for rank in first + second] == [None, None]
