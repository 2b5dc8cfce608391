"""Servers that have no memory while the trainer trains, whatever way weights come back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist import WorkerPool
from tests.sync.pushing import Trainer
from tests.sync.servers import Server, several

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def lasting(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with several(models[0], tmp_path_factory.mktemp("run"), 1) as servers:
        yield servers


def slept(trainer: Trainer, **how: Any) -> Any:
    """Rank 0's account; that of the others is the same."""
    described = [server.described for server in trainer.servers]
    files = [trainer.file(1), trainer.file(2)]
    work = "tests.work_servers:sleeps"
    ranks = trainer.pool.run(work, world=2, files=files, servers=described, **how)
    assert ranks[0][1] == ranks[1][1]
    return ranks[0]


@pytest.mark.parametrize("way", ["links", "colocated", "disk"])
def test_memory_is_given_back_while_the_trainer_trains_and_there_for_the_next_push(
    pool: WorkerPool, models: list[Path], lasting: list[Server], tmp_path: Path, way: str
) -> None:
    lasting[0].reload(models[0])
    trainer = Trainer(pool, models, lasting)
    (tmp_path / "served").symlink_to(models[0])
    how: dict[str, Any] = {"links": {}, "colocated": {"colocated": True}}.get(
        way, {"folder": tmp_path}
    )
    looks, serving, given_up = slept(trainer, **how)
    before, during, after = (look[0] for look in looks)
    assert [s["weight_version"] for s in (before, during, after)] == ["1", "1", "2"]
    assert during["released"] == ["kv_cache", "weights"] and during["paused"] == "retract"
    assert before["released"] == after["released"] == [] and after["paused"] is None
    assert (serving, given_up) == ([lasting[0].name], [])
    trainer.serves(lasting[0], 2)


def test_one_that_dies_asleep_is_given_up_and_the_others_wake(trainer: Trainer) -> None:
    """The last of them is named like the second, and left out here."""
    trainer.servers.pop()
    victim = trainer.servers[1]
    _, serving, given_up = slept(trainer, killed=victim.pid)
    left = [server for server in trainer.servers if server is not victim]
    assert serving == [server.name for server in left] and given_up == [victim.name]
    for server in left:
        trainer.serves(server, 2)
