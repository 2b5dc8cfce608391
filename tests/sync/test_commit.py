"""A version is committed by the process that got its weights, and by no other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.control import ServerControl
from megarl.types import Push
from tests.helpers.dist import WorkerPool
from tests.sync.pushing import BOUND_S, Trainer
from tests.sync.servers import Proxy, Server, http, proxied, several

pytestmark = pytest.mark.dist

WEIGHTS_CHECKER = "/weights_checker"


@pytest.fixture(scope="module")
def lasting(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with several(models[0], tmp_path_factory.mktemp("run"), 2) as servers:
        yield servers


@pytest.fixture
def pair(pool: WorkerPool, models: list[Path], lasting: list[Server]) -> Trainer:
    for server in lasting:
        server.reload(models[0])
    return Trainer(pool, models, lasting)


@pytest.fixture(params=["broadcast", "disk"])
def way(request: Any, models: list[Path], tmp_path: Path) -> dict[str, Any]:
    if request.param == "broadcast":
        return {}
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "served").symlink_to(models[0])
    return {"folder": folder}


class Replaced(Proxy):
    """Another process answers from when the digests were told: as started anew, from its files."""

    successor: Server

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        found = super().answer(path, body)
        if path == WEIGHTS_CHECKER:
            self.target = self.successor
        return found


class Resumed(Proxy):
    """Somebody lets it go on in the middle of the push."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == WEIGHTS_CHECKER:
            http(self.target.url, self.target.key, "/continue_generation", {})
        return super().answer(path, body)


def behind(pair: Trainer, proxy: Proxy, **way: Any) -> Push:
    """A push to the first server, which is asked by way of the proxy."""
    first = pair.servers[0]
    server = Server(first.name, proxy.url, first.key, first.pid, first.process)
    [push], _, _ = Trainer(pair.pool, pair.models, [server]).push([0], world=1, **way)
    return push


def test_a_process_that_took_the_place_of_the_one_with_the_weights_gets_no_version(
    pair: Trainer, way: dict[str, Any]
) -> None:
    first, second = pair.servers
    with proxied(first, "", kind=Replaced) as proxy:
        assert isinstance(proxy, Replaced)
        proxy.successor = second
        push = behind(pair, proxy, **way)
    assert push.receipt is None
    assert "another process answers at its address" in push.lost[first.name]
    assert [server.version() for server in pair.servers] == ["0", "0"]


def test_one_that_somebody_let_go_on_gets_no_version(
    pair: Trainer, models: list[Path], tmp_path: Path
) -> None:
    """Of a folder; an open update keeps an embedded server from going on."""
    first = pair.servers[0]
    (tmp_path / "served").symlink_to(models[0])
    with proxied(first, "", kind=Resumed) as proxy:
        assert behind(pair, proxy).lost == {} and first.version() == "1"
        first.reload(models[0])
        push = behind(pair, proxy, folder=tmp_path)
    assert "somebody let it go on in the middle" in push.lost[first.name]
    assert first.version() == "0"


def test_another_process_that_answers_the_last_call_of_a_commit_is_noticed(
    lasting: list[Server], models: list[Path]
) -> None:
    """It let nothing generate that it should not have: it is told so after the fact."""
    first, second = lasting
    for server in lasting:
        server.reload(models[0])
    with proxied(first, "/continue_generation") as proxy:
        control = ServerControl(proxy.url, first.key, "server")
        control.control("begin", {"session": False}, 30)
        proxy.rewrite = lambda status, reply: (setattr(proxy, "target", second), (status, reply))[1]
        with pytest.raises(Exception, match="server: another process answers"):
            control.control("commit", {"version": 3, "session": False}, 30)


def test_a_folder_is_taken_after_an_update_that_a_killed_trainer_left_open(
    pair: Trainer, models: list[Path], tmp_path: Path
) -> None:
    server = pair.servers[0]
    http(server.url, server.key, "/pause_generation", {"mode": "retract"})
    assert http(server.url, server.key, "/begin_weight_update", {})[0] == 200
    (tmp_path / "served").symlink_to(models[0])
    [push], _, _ = pair.push([0], world=1, folder=tmp_path)
    assert push.lost == {}
    pair.serves(server, 1)


def test_a_rank_that_cannot_bring_its_weights_back_ends_the_push_on_all_at_once(
    pair: Trainer,
) -> None:
    described = [server.described for server in pair.servers]
    pushes = [(1, pair.file(1), [0, 1])]
    how = {"servers": described, "pushes": pushes, "poor_rank": 1}
    ranks = pair.pool.run("tests.sync.work_push:push", world=2, stages=1, **how)
    for rank in ranks:
        error, push, seconds = rank["steps"][0]
        assert push is None and seconds < BOUND_S
        assert error[0] == "SyncError"
        assert "bringing the weights back failed on rank 1" in error[1] and "no room" in error[1]
