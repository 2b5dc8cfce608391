"""What has gone wrong elsewhere in weight updates, whole kinds (E5, E7, E8, E9, E12)."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megarl.errors import SyncError
from megarl.sync.group import create_store, join_group, leave_group
from megarl.types import Push
from tests.helpers.dist import WorkerPool
from tests.sync.servers import Forge, Rewrite, Server, digests_of, http, proxied, started
from tests.sync.test_broadcast import no_success

pytestmark = pytest.mark.dist

DEADLINE_S = 2.0
RECEIVE = "/update_weights_from_distributed"


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tiny_model, tmp_path_factory.mktemp("run")) as server:
        yield server
        assert server.process.is_alive()


@pytest.fixture
def server(served: Server, tiny_model: Path) -> Server:
    served.reload(tiny_model)
    return served


@pytest.fixture(scope="module")
def other_file(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights, every one of them."""
    from safetensors.torch import save_file

    tensors = {n: t + 0.125 for n, t in load_file(tiny_model / "model.safetensors").items()}
    file = tmp_path_factory.mktemp("other") / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    return file


Pushing = Callable[..., tuple[Push, float]]


@pytest.fixture
def push(pool: WorkerPool, other_file: Path) -> Pushing:
    def run(server: Server, url: str, **how: Any) -> tuple[Push, float]:
        """What became of version 7 sent to the server at this address, and its seconds."""
        [rank] = pool.run(
            "tests.sync.work_push:push",
            world=1,
            stages=1,
            servers=[{**server.described, "url": url}],
            pushes=[(7, other_file, [0])],
            deadline_s=DEADLINE_S,
            **how,
        )
        [(error, done, seconds)] = rank["steps"]
        assert error is None
        return done, seconds

    return run


def is_lost(server: Server, done: Push, seconds: float, *, version: str = "0") -> str:
    """In bounded time, and it neither samples nor claims the new version; returns why."""
    assert list(done.lost) == [server.name] and done.receipt is None
    assert seconds < 2 * DEADLINE_S + 2
    state = http(server.url, server.key, "/server_info")[1]
    assert (state["paused"], state["weight_version"]) == ("retract", version)
    return done.lost[server.name]


# --- E5: 200, but not done ------------------------------------------------------------------------


def a_word(status: int, reply: Any) -> tuple[int, Any]:
    return 200, "OK"


def a_list(status: int, reply: Any) -> tuple[int, Any]:
    return 200, [{"success": True}]


@pytest.mark.parametrize("answer", [no_success, a_word, a_list])
@pytest.mark.parametrize(
    "path",
    [
        "/pause_generation",
        "/init_weights_update_group",
        RECEIVE,
        "/weights_checker",
        "/update_weight_version",
    ],
)
def test_e5_an_operation_counts_as_done_only_where_the_server_says_so(
    server: Server, push: Pushing, path: str, answer: Rewrite
) -> None:
    with proxied(server, path, answer, times=10) as proxy:
        done, seconds = push(server, proxy.url)
    assert list(done.lost) == [server.name] and done.receipt is None
    assert path in done.lost[server.name] and seconds < 2 * DEADLINE_S + 2
    assert http(server.url, server.key, "/server_info")[1]["paused"] == "retract"


# --- E7: pause, update, flush, resume -------------------------------------------------------------


def test_e7_sampling_stops_first_and_goes_on_last_with_an_empty_cache(
    server: Server, push: Pushing
) -> None:
    with proxied(server, "/nothing") as proxy:
        done, _ = push(server, proxy.url, max_bytes=100_000)
    assert done.lost == {}
    paths = [p for p in proxy.paths if p not in ("/server_info", "/model_info")]
    received = paths.count(RECEIVE)
    assert received > 3
    assert paths == [
        "/pause_generation",
        "/begin_weight_update",
        "/init_weights_update_group",
        *[RECEIVE] * received,
        "/weights_checker",
        "/end_weight_update",
        "/flush_cache",
        "/update_weight_version",
        "/continue_generation",
        "/destroy_weights_update_group",
    ]


def busy(status: int, reply: Any) -> tuple[int, Any]:
    return 400, "Flush cache failed."


def crashed(status: int, reply: Any) -> tuple[int, Any]:
    return 500, "Internal Server Error"


def gone(status: int, reply: Any) -> tuple[int, Any]:
    return 404, {"detail": "Not Found"}


@pytest.mark.parametrize("answer", [busy, crashed, gone])
def test_e7_a_cache_that_is_not_emptied_is_an_error_in_the_end(
    server: Server, push: Pushing, answer: Rewrite
) -> None:
    with proxied(server, "/flush_cache", answer, forward=False, times=10**6) as proxy:
        done, seconds = push(server, proxy.url)
    assert "/flush_cache" in is_lost(server, done, seconds)
    assert "/continue_generation" not in proxy.paths


# --- E8: groups that do not come together ---------------------------------------------------------


def changed(**fields: Any) -> Forge:
    return lambda body: {**body, **{k: v(body[k]) for k, v in fields.items()}}


@pytest.mark.parametrize(
    "forge",
    [
        changed(world_size=lambda n: n + 1),
        changed(world_size=lambda n: n - 1),
        changed(rank_offset=lambda n: n - 1),
        changed(group_name=lambda name: f"{name}-other"),
        changed(master_port=lambda port: 1),
        changed(backend=lambda name: "mpi"),
    ],
    ids=["more", "fewer", "a rank twice", "another name", "another port", "another backend"],
)
def test_e8_a_server_that_joins_another_group_is_lost_in_time_and_serves_again_later(
    server: Server, push: Pushing, other_file: Path, forge: Forge
) -> None:
    path = "/init_weights_update_group"
    with proxied(server, path, forge=forge) as proxy:
        reason = is_lost(server, *push(server, proxy.url))
    assert re.search(r"\(joining group megarl-\w+-rank0-\d of 2 at 127\.0\.0\.1:\d+\)", reason)
    done, _ = push(server, server.url)  # its engine does not stand still in the other group
    assert done.lost == {}
    assert server.digests() == digests_of(other_file.parent)


def later(body: dict[str, Any]) -> dict[str, Any]:
    time.sleep(DEADLINE_S / 2)
    return body


def test_e8_a_server_that_joins_late_is_waited_for(server: Server, push: Pushing) -> None:
    with proxied(server, "/init_weights_update_group", forge=later) as proxy:
        done, seconds = push(server, proxy.url)
    assert done.lost == {} and seconds > DEADLINE_S / 2


# --- E9: ports, addresses, proxies ----------------------------------------------------------------


def test_e9_a_stores_port_is_its_own_from_the_moment_it_is_chosen() -> None:
    stores = [create_store("127.0.0.1") for _ in range(3)]
    assert len({port for _, port in stores}) == 3
    for _, port in stores:
        with pytest.raises(OSError):
            socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_e9_any_way_to_write_this_machine_will_do(host: str) -> None:
    try:
        store, port = create_store(host)
    except SyncError:
        pytest.skip("no IPv6 on this machine") if ":" in host else pytest.fail(host)
    address = f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"
    group = join_group(
        address, rank=0, world_size=1, group_name="g", backend="gloo", timeout_s=10.0
    )
    leave_group(group)
    del store


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_e9_proxies_of_the_environment_do_not_see_a_push(
    server: Server, push: Pushing, name: str
) -> None:
    black_hole = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{black_hole.getsockname()[1]}"
    try:
        done, _ = push(server, server.url, environment={name: url})
    finally:
        black_hole.close()
    assert done.lost == {}


# --- E12: "success", and nothing has changed ------------------------------------------------------


def fine(status: int, reply: Any) -> tuple[int, Any]:
    return 200, {"success": True, "message": "Received."}


@pytest.mark.parametrize("arrives", [[], [0], [0, 2]], ids=str)
def test_e12_a_server_that_ignores_what_it_is_sent_is_found_out(
    server: Server, push: Pushing, arrives: list[int]
) -> None:
    """All of it, or one bucket: nobody takes the bytes."""
    with proxied(server, RECEIVE, fine, forward=arrives.__contains__, times=10**6) as proxy:
        done, seconds = push(server, proxy.url, max_bytes=200_000)
    is_lost(server, done, seconds)


def test_e12_weights_that_went_back_to_the_old_ones_are_found_out(
    server: Server, push: Pushing, tiny_model: Path
) -> None:
    """As a server that reloads its folder when an update ends."""

    def revert(status: int, reply: Any) -> tuple[int, Any]:
        return 200, {"success": True, "message": "", "digests": digests_of(tiny_model)}

    with proxied(server, "/weights_checker", revert, forward=False) as proxy:
        reason = is_lost(server, *push(server, proxy.url))
    assert f"{len(digests_of(tiny_model))} differ" in reason
