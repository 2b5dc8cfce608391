"""Pushes of what changed: less is sent, and servers hold the same as after whole ones."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.types import Push
from tests.conftest import make_tiny_model
from tests.helpers.dist import WorkerPool
from tests.sync.servers import Server, digests_of, http, proxied, several
from tests.sync.test_broadcast import no_success
from tests.sync.watched import Blow

pytestmark = pytest.mark.dist

SHARE = 0.01  # of elements that change from one version to the next
RECEIVE = "/update_weights_from_distributed"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model and what became of it, a few elements of each tensor at a time; the last version has
    nothing of it left.
    """
    folder = tmp_path_factory.mktemp("models")
    first = make_tiny_model(folder / "0", "--init-std", "0.1")
    tensors = load_file(first / "model.safetensors")
    chance = torch.Generator().manual_seed(3)
    for version in (1, 2, 3):
        shutil.copytree(first, folder / f"{version}")
        for tensor in tensors.values():
            hit = torch.rand(tensor.shape, generator=chance) < (SHARE if version < 3 else 2)
            tensor[hit] += 0.001
        file = folder / f"{version}" / "model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
    return [first, *(folder / f"{version}" for version in (1, 2, 3))]


@pytest.fixture
def servers(versions: list[Path], tmp_path: Path) -> Iterator[list[Server]]:
    with several(versions[0], tmp_path / "run", 2) as servers:
        yield servers


class Trainer:
    def __init__(self, pool: WorkerPool, versions: list[Path], servers: list[Server]) -> None:
        self.pool, self.versions, self.servers = pool, versions, servers

    def push(self, *pushes: tuple[int, list[int]], **options: Any) -> list[Push]:
        """One for each (version, servers); version 0 is what servers start with."""
        ranks = self.pool.run(
            "tests.sync.work_push:push",
            world=2,
            stages=2,
            servers=[server.described for server in self.servers],
            pushes=[
                (version, self.versions[version] / "model.safetensors", whom)
                for version, whom in pushes
            ],
            **{"delta": True, "max_bytes": 2**18, **options},
        )
        assert [step[0] for rank in ranks for step in rank["steps"]] == [None] * 2 * len(pushes)
        return [step[1] for step in ranks[0]["steps"]]

    def serves(self, server: Server, version: int) -> None:
        assert server.digests() == digests_of(self.versions[version])
        status, reply = server.generate()
        assert (status, reply["meta_info"]["weight_version"]) == (200, str(version))

    @property
    def whole(self) -> int:
        tensors = load_file(self.versions[0] / "model.safetensors")
        return sum(t.nbytes for t in tensors.values())


@pytest.fixture
def trainer(pool: WorkerPool, versions: list[Path], servers: list[Server]) -> Trainer:
    return Trainer(pool, versions, servers)


def sizes(pushes: list[Push]) -> list[int]:
    return [push.receipt.num_bytes for push in pushes if push.receipt is not None]


@pytest.mark.parametrize("way", [{}, {"colocated": True, "max_bytes": 2**14}], ids=str)
def test_only_what_changed_is_sent_and_everything_is_right(
    trainer: Trainer, way: dict[str, Any]
) -> None:
    """Over groups, or in shared memory; there with tensors that are larger than a bucket."""
    steps = [(0, [0, 1]), (1, [0, 1]), (2, [0, 1]), (2, [0, 1]), (3, [0, 1])]
    pushes = trainer.push(*steps, **way)
    assert [push.lost for push in pushes] == [{}] * 5
    first, second, third, same, all_new = sizes(pushes)
    assert first >= trainer.whole and all_new >= trainer.whole
    # At most a byte of place and 4 of value for an element, and some for each block and name.
    most = trainer.whole / 4 * SHARE * 2 * 5 + 2 * trainer.whole / 1024 + 2**16
    assert second < most and third < most and same < 2**16
    assert len({push.receipt.tensors for push in pushes if push.receipt}) == 1
    for server in trainer.servers:
        trainer.serves(server, 3)


def test_a_server_that_holds_something_else_makes_the_push_whole_and_the_next_is_not(
    trainer: Trainer,
) -> None:
    """It came later, or missed a version: what counts is what it says it holds."""
    pushes = trainer.push(
        (1, [0]), (2, [0]), (2, [1]), (1, [0, 1]), (2, [1]), (1, [0]), (2, [0, 1])
    )
    assert [push.lost for push in pushes] == [{}] * 7
    whole = [size >= trainer.whole for size in sizes(pushes)]
    # 0 has 1, 2; 1 began with 0 and gets 2; both 1; 1 alone 2; 0 alone holds 1; 0 has 1, 1 has 2.
    assert whole == [True, False, True, False, False, True, True]
    for server in trainer.servers:
        trainer.serves(server, 2)


def test_a_push_that_failed_half_way_is_followed_by_one_that_mends_it(trainer: Trainer) -> None:
    """The server has some tensors of version 2, some of 1, and knows which."""
    server = trainer.servers[0]
    seen = iter(range(10**6))
    refuse = lambda status, reply: (  # noqa: E731
        no_success(status, reply) if next(seen) == 3 else (status, reply)
    )
    with proxied(replace(server), RECEIVE, refuse, times=10**6) as proxy:
        direct, server.url = server.url, proxy.url
        pushes = trainer.push((1, [0]), (2, [0]), (3, [0]), (2, [0]))
        server.url = direct
    assert [list(push.lost) for push in pushes].count([server.name]) == 1
    assert pushes[-1].lost == {}
    trainer.serves(server, 2)


def test_a_base_that_is_not_what_the_server_says_is_refused_and_the_server_lost(
    trainer: Trainer,
) -> None:
    """Its account of what it holds was wrong: nothing is made of it."""
    server = trainer.servers[0]
    lie = digests_of(trainer.versions[1])

    def held(status: int, reply: Any) -> tuple[int, Any]:
        return status, {**reply, "digests": lie} if "digests" in reply else reply

    with proxied(replace(server), "/weights_checker", held, times=10**6) as proxy:
        direct, server.url = server.url, proxy.url
        pushes = trainer.push((1, [1]), (2, [0]))
        server.url = direct
    assert pushes[0].lost == {} and list(pushes[1].lost) == [server.name]
    assert "came as a change of" in pushes[1].lost[server.name]
    state = http(server.url, server.key, "/server_info")[1]
    assert (state["paused"], state["weight_version"]) == ("retract", "0")


def unknown(status: int, reply: Any) -> tuple[int, Any]:
    return 400, {"error": {"message": "unknown action: held"}}


def test_a_server_that_takes_no_changes_is_lost_before_it_is_paused(trainer: Trainer) -> None:
    server = trainer.servers[0]
    with proxied(replace(server), "/weights_checker", unknown) as proxy:
        direct, server.url = server.url, proxy.url
        [push] = trainer.push((1, [0, 1]))
        server.url = direct
    assert list(push.lost) == [server.name]
    assert "unknown action" in push.lost[server.name] and "sync.delta" in push.lost[server.name]
    assert http(server.url, server.key, "/server_info")[1]["paused"] is None
    trainer.serves(server, 0)
    trainer.serves(trainer.servers[1], 1)


def test_one_that_dies_costs_the_others_nothing(trainer: Trainer) -> None:
    victim, other = trainer.servers
    blow = Blow("receive", 3, victim.pid)
    pushes = trainer.push((1, [0, 1]), (2, [0, 1]), (1, [1]), blows={str(victim.pid): blow})
    assert [list(push.lost) for push in pushes].count([victim.name]) == 1
    trainer.serves(other, 1)
