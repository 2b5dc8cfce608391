"""Weights of real actors reach real servers bit for bit; servers that fail are left out, in time.

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

from megarl.types import Push
from tests.actor.compare import mesh_of
from tests.helpers.dist import WorkerPool
from tests.sync.servers import Rewrite, Server, digests_of, http, proxied, started

pytestmark = pytest.mark.dist

HUGE = 2**26
BOUND_S = 15.0  # of a failure; the operations' own deadline is 60 s unless a test sets it


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tiny_model, tmp_path_factory.mktemp("run")) as server:
        yield server
        assert server.process.is_alive()


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


def push(
    pool: WorkerPool, layout: dict[str, int], *servers: dict[str, Any], **arguments: Any
) -> list[dict[str, Any]]:
    """Every rank's account of it: of one push to all of them, version 7, unless told otherwise."""
    world = mesh_of(layout).world_size
    work = "tests.sync.work_broadcast:push"
    versions = arguments.pop("versions", [7])
    everyone = [(version, range(len(servers))) for version in versions]
    arguments = {"pushes": everyone, "servers": servers, **arguments}
    return pool.run(work, world=world, layout=layout, **arguments)


def outcomes(ranks: list[dict[str, Any]], step: int = 0) -> tuple[Push, float]:
    """Of a push that raised nowhere: rank 0's account, and how long it took; all ranks agree on
    who was lost.
    """
    assert [rank["steps"][step][0] for rank in ranks] == [None] * len(ranks)
    pushes = [rank["steps"][step][1] for rank in ranks]
    assert all(p.lost == pushes[0].lost for p in pushes)
    assert [p.receipt for p in pushes[1:]] == [None] * (len(ranks) - 1)
    return pushes[0], max(rank["steps"][step][2] for rank in ranks)


def only_loss(ranks: list[dict[str, Any]], server: dict[str, Any], step: int = 0) -> str:
    """Why the only server of a push was lost, in bounded time."""
    push, seconds = outcomes(ranks, step)
    assert push.receipt is None and seconds < BOUND_S
    assert list(push.lost) == [server["name"]]
    return push.lost[server["name"]]


def at(server: Server, url: str) -> dict[str, Any]:
    """A server behind a proxy."""
    return {**server.described, "url": url}


# --- whole pushes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "max_bytes", "offload", "senders"),
    [
        ({"dp": 2, "ep": 2}, 100_000, "idle", 2),
        ({"tp": 2}, 1, "none", 1),  # every tensor is larger than a bucket and travels alone
        ({"tp": 2}, 100_000, "none", 2),
        ({"pp": 2}, 100_000, "none", 1),  # two senders, a group each
        ({}, HUGE, "idle", 1),  # everything in one bucket
    ],
    ids=str,
)
def test_every_weight_arrives_bit_for_bit(
    pool: WorkerPool,
    server: Server,
    other_model: Path,
    layout: dict[str, int],
    max_bytes: int,
    offload: str,
    senders: int,
) -> None:
    before = server.generate()[1]["meta_info"]["weight_version"]
    how = {"max_bytes": max_bytes, "offload": offload, "senders": senders}
    ranks = push(pool, layout, server.described, hf=other_model, **how)
    expected = digests_of(other_model)
    assert server.digests() == expected

    done, _ = outcomes(ranks)
    assert done.lost == {} and done.receipt is not None
    lines = "".join(f"{name} {expected[name]}\n" for name in sorted(expected))
    assert done.receipt.digest == hashlib.sha256(lines.encode()).hexdigest()
    assert (done.receipt.version, done.receipt.tensors) == (7, len(expected))
    file = load_file(other_model / "model.safetensors")
    assert done.receipt.num_bytes == sum(t.nbytes for t in file.values())

    operations = [seen for rank in ranks for seen in rank["seen"][server.name]]
    assert {(b, a) for op, b, a in operations if op != "commit"} == {("0", "0")}
    assert [(b, a) for op, b, a in operations if op == "commit"] == [("0", "7")]
    received = [op for op, *_ in operations].count("receive")
    assert received == {1: len(expected), HUGE: 1}.get(max_bytes, received)
    assert received > 1 or max_bytes == HUGE
    assert done.receipt.calls == received
    sent = ["receive" in [op for op, *_ in rank["seen"][server.name]] for rank in ranks]
    assert sum(sent) == senders * layout.get("pp", 1)
    status, reply = server.generate()
    assert (before, status, reply["meta_info"]["weight_version"]) == ("0", 200, "7")


def test_one_connection_serves_many_pushes(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    ranks = push(pool, {"dp": 2}, server.described, hf=other_model, versions=[1, 2, 5])
    assert [outcomes(ranks, k)[0].lost for k in range(3)] == [{}] * 3
    operations = ranks[0]["seen"][server.name]
    assert [after for op, _, after in operations if op == "commit"] == ["1", "2", "5"]
    assert [op for op, *_ in operations].count("join_group") == 1
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


@pytest.mark.parametrize("path", ["/update_weights_from_distributed", "/end_weight_update"])
def test_a_server_that_answers_200_without_success_is_lost(
    pool: WorkerPool, server: Server, other_model: Path, path: str
) -> None:
    with proxied(server, path, no_success) as proxy:
        lying = at(server, proxy.url)
        text = only_loss(push(pool, {"dp": 2}, lying, hf=other_model), lying)
    assert "half written" in text and path in text
    state = http(server.url, server.key, "/server_info")[1]
    assert (state["weight_version"], state["paused"]) == ("0", "retract")  # samples nothing


def test_an_update_that_was_left_open_is_closed_and_begun_anew(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    """SGLang refuses a second begin; here the first one looks like that."""
    with proxied(server, "/begin_weight_update", no_success) as proxy:
        ranks = push(pool, {}, at(server, proxy.url), hf=other_model)
    assert outcomes(ranks)[0].lost == {}
    first = proxy.paths.index("/begin_weight_update")
    assert proxy.paths[first : first + 3] == [
        "/begin_weight_update",
        "/end_weight_update",
        "/begin_weight_update",
    ]
    assert server.digests() == digests_of(other_model)


def still_running(status: int, reply: Any) -> tuple[int, Any]:
    return 400, "Flush cache failed."


def test_a_cache_is_emptied_after_the_weights_and_before_sampling_however_often_it_takes(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    path = "/flush_cache"
    with proxied(server, path, still_running, forward=False, times=3) as proxy:
        ranks = push(pool, {}, at(server, proxy.url), hf=other_model)
    assert outcomes(ranks)[0].lost == {}
    last = max(k for k, p in enumerate(proxy.paths) if p == "/update_weights_from_distributed")
    asked = [p for p in proxy.paths[last + 1 :] if p not in ("/server_info", "/model_info")]
    assert asked == [
        "/weights_checker",
        "/end_weight_update",
        *["/flush_cache"] * 4,
        "/update_weight_version",
        "/continue_generation",
        "/destroy_weights_update_group",
    ]


def test_a_server_that_keeps_its_cache_is_lost_and_samples_nothing(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    path = "/flush_cache"
    with proxied(server, path, still_running, forward=False, times=10**6) as proxy:
        lying = at(server, proxy.url)
        ranks = push(pool, {}, lying, hf=other_model, deadline_s=2.0)
    assert path in only_loss(ranks, lying)
    assert outcomes(ranks)[1] < 4
    state = http(server.url, server.key, "/server_info")[1]
    assert (state["weight_version"], state["paused"]) == ("0", "retract")


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize(
    ("rewrite", "words"),
    [
        (one_bit_wrong, ["1 differ", "model.norm.weight", "0 missing", "0 more"]),
        (one_missing, ["0 differ", "1 missing", "model.norm.weight", "1 more", "model.ghost"]),
    ],
)
def test_a_server_that_holds_other_weights_is_lost_and_the_next_push_mends_it(
    pool: WorkerPool,
    server: Server,
    other_model: Path,
    layout: dict[str, int],
    rewrite: Rewrite,
    words: list[str],
) -> None:
    with proxied(server, "/weights_checker", rewrite) as proxy:
        lying = at(server, proxy.url)
        ranks = push(pool, layout, lying, hf=other_model, versions=[7, 8])
    text = only_loss(ranks, lying)
    assert all(word in text for word in words), text
    assert outcomes(ranks, 1)[0].lost == {}
    operations = ranks[0]["seen"][server.name]
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
    server = served.described
    limits = {"dtype": "bf16", "deadline_s": REFUSAL_DEADLINE_S}
    return push(pool, {"dp": 2}, server, hf=other_model, **limits)


def test_weights_that_the_server_cannot_take_are_refused_at_once(
    refused: list[dict[str, Any]], served: Server
) -> None:
    """The broadcast that nobody receives is not waited for."""
    text = only_loss(refused, served.described)
    assert "bfloat16" in text and "float32" in text
    assert outcomes(refused)[1] < REFUSAL_DEADLINE_S
    assert served.version() == "0"


def test_a_transport_whose_push_failed_closes_at_once(refused: list[dict[str, Any]]) -> None:
    assert max(rank["steps"][1][2] for rank in refused) < REFUSAL_DEADLINE_S / 2


def test_a_server_that_is_not_there_is_lost(pool: WorkerPool, other_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    nobody = {"name": "nobody", "url": url, "key": "k", "boot": "1"}
    text = only_loss(push(pool, {"dp": 2}, nobody, hf=other_model, deadline_s=2.0), nobody)
    assert "begin" in text and "Cannot connect" in text


def test_a_server_that_refuses_to_join_is_lost(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    path = "/init_weights_update_group"
    with proxied(server, path, no_success, forward=False) as proxy:
        lying = at(server, proxy.url)
        text = only_loss(push(pool, {"dp": 2}, lying, hf=other_model, deadline_s=3.0), lying)
    assert "half written" in text


def test_a_server_can_be_joined_by_the_next_trainer(
    pool: WorkerPool, server: Server, other_model: Path
) -> None:
    """As a server of ``rollout.urls`` is, when a run is resumed: the one before was killed, and has
    left nothing.
    """
    first = push(pool, {}, server.described, hf=other_model, leave=False)
    second = push(pool, {}, server.described, hf=other_model, deadline_s=6.0)
    assert [outcomes(ranks)[0].lost for ranks in (first, second)] == [{}, {}]
