"""Servers that have no memory while the trainer trains, whatever way weights come back."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

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
    ways: dict[str, dict[str, Any]] = {
        "links": {},
        "colocated": {"colocated": True},
        "disk": {"folder": tmp_path},
    }
    looks, serving, given_up = slept(trainer, **ways[way])
    before, during, after = (look[0] for look in looks)
    assert [s["weight_version"] for s in (before, during, after)] == ["1", "1", "2"]
    assert during["released"] == ["kv_cache", "weights"] and during["paused"] == "retract"
    assert before["released"] == after["released"] == [] and after["paused"] is None
    assert (serving, given_up) == ([lasting[0].name], [])
    trainer.serves(lasting[0], 2)


def test_no_changes_are_made_to_weights_that_are_gone(
    pool: WorkerPool, models: list[Path], lasting: list[Server], tmp_path: Path
) -> None:
    """An element of each tensor is another one in the next version: all of them are sent."""
    changed = shutil.copytree(models[1], tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    for tensor in tensors.values():
        tensor.view(-1)[0] += 1
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    lasting[0].reload(models[0])
    trainer = Trainer(pool, [changed, models[1]], lasting)
    _, serving, given_up = slept(trainer, delta=True)
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
