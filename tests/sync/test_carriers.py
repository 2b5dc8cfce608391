"""What holds of a push whatever way its buckets take: shared memory, or a folder on disk; process
groups are in test_broadcast.py and test_push_losses.py.

Real servers; the trainer's ranks have weights of a file. What a server must hold is read from it.
"""

import hashlib
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model, wide
from tests.rollout.test_embedded_fp8_weights import in_fp8
from tests.sync.pushing import BOUND_S, Trainer
from tests.sync.servers import Server, digests_of, http, proxied, several
from tests.sync.test_broadcast import no_success, one_bit_wrong
from tests.sync.watched import Blow

pytestmark = pytest.mark.dist

Way = dict[str, Any]  # as tests.sync.work_push.file_transport takes it
OPERATION = {"colocated": "receive_shared", "disk": "load_path"}
PATH = {
    "colocated": "/update_weights_from_shared_memory",
    "disk": "/update_weights_from_disk",
}


@pytest.fixture(params=["colocated", "disk"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def way(name: str, models: list[Path], tmp_path: Path) -> Way:
    if name == "colocated":
        return {"colocated": True}
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "served").symlink_to(models[0])
    return {"folder": folder}


@pytest.fixture(scope="module")
def lasting(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with several(models[0], tmp_path_factory.mktemp("run"), 2) as servers:
        yield servers


@pytest.fixture
def pair(pool: WorkerPool, models: list[Path], lasting: list[Server]) -> Trainer:
    """Two servers that serve version 0."""
    for server in lasting:
        server.reload(models[0])
    return Trainer(pool, models, lasting)


@pytest.mark.parametrize(("world", "stages", "senders"), [(2, 2, 1), (2, 1, 2)])
def test_every_tensor_of_every_sender_arrives_and_the_version_moves_at_the_end(
    pair: Trainer, name: str, way: Way, world: int, stages: int, senders: int
) -> None:
    how = {"world": world, "stages": stages, "senders": senders, "max_bytes": 2**22}
    pushes, _, seen = pair.push([0, 1], [0], [0, 1], **how, **way)
    assert [push.lost for push in pushes] == [{}, {}, {}]
    expected = digests_of(pair.models[1])
    tensors = load_file(pair.file(1))
    assert pushes[0].receipt is not None
    lines = "".join(f"{n} {expected[n]}\n" for n in sorted(expected))
    assert pushes[0].receipt.digest == hashlib.sha256(lines.encode()).hexdigest()
    assert pushes[0].receipt.tensors == len(tensors)
    assert pushes[0].receipt.num_bytes == sum(t.nbytes for t in tensors.values())
    assert pushes[0].receipt.calls > 25 * 2**20 // 2**22  # in buckets of at most 4 MB
    for server, versions in zip(pair.servers, ([1, 2, 3], [1, 3]), strict=True):
        pair.serves(server, 3)
        operations = seen[str(server.pid)]
        moves = [(op, int(after)) for op, before, after in operations if before != after]
        assert moves == [("commit", version) for version in versions]
        asked = [op for op, *_ in operations].count(OPERATION[name])
        sent = [p.receipt.calls for p in pushes if p.receipt and p.receipt.version in versions]
        assert asked == (sum(sent) if name == "colocated" else len(versions))


def test_one_that_refuses_or_holds_other_weights_is_lost_and_mended_by_the_next_push(
    pair: Trainer, name: str, way: Way
) -> None:
    liar = pair.servers[1]
    direct = liar.url
    refuses = proxied(replace(liar), PATH[name], no_success, forward=False)
    with refuses as proxy:
        liar.url = proxy.url
        refused, _, _ = pair.push([0, 1], [0, 1], **way)
    liar.url = direct
    with proxied(replace(liar), "/weights_checker", one_bit_wrong) as proxy:
        liar.url = proxy.url
        wrong, _, _ = pair.push([0, 1], [0, 1], **way)
    liar.url = direct
    assert [set(push.lost) for push in refused + wrong] == [{liar.name}, set()] * 2
    assert "half written" in refused[0].lost[liar.name]
    assert "1 differ ['model.norm.weight']" in wrong[0].lost[liar.name]
    for server in pair.servers:
        pair.serves(server, 2)


def test_a_trainer_that_fails_itself_fails_everywhere_and_servers_keep_what_they_have(
    pair: Trainer, name: str, way: Way
) -> None:
    described = [server.described for server in pair.servers]
    work = "tests.sync.work_push:push"
    pushes = [(1, pair.file(1), [0, 1])]
    ranks = pair.pool.run(
        work, world=2, stages=2, servers=described, pushes=pushes, broken_rank=1, **way
    )
    for rank in ranks:
        error, push, seconds = rank["steps"][0]
        assert push is None and seconds < BOUND_S
        assert error[0] == "SyncError" and "could not be gathered" in error[1]
    for server in pair.servers:
        state = http(server.url, server.key, "/server_info")[1]
        assert (state["paused"], state["weight_version"]) == ("retract", "0")
    if name == "disk":
        left = {path.name for path in way["folder"].iterdir()}
        assert left == {"served", ".megarl-lock"}  # nothing half written, under no name


def test_one_that_hangs_is_left_behind_at_the_deadline_and_one_that_dies_at_once(
    trainer: Trainer, name: str, way: Way
) -> None:
    """The third goes on; then one that has taken its place gets the next push with it."""
    hangs, dies = trainer.servers[0], trainer.servers[1]
    op, nth = OPERATION[name], 1 if name == "colocated" else 0
    blows = {
        str(hangs.pid): Blow(op, nth, hangs.pid, signal.SIGSTOP),
        str(dies.pid): Blow(op, nth, dies.pid, later_s=0.3),
    }
    pushes, seconds, _ = trainer.push(
        [0, 1, 2], [2, 3], deadline_s=4.0, max_bytes=2**22, blows=blows, **way
    )
    assert [set(push.lost) for push in pushes] == [{hangs.name, dies.name}, set()]
    assert "did not end within 4 s" in pushes[0].lost[hangs.name]
    assert dies.url in pushes[0].lost[dies.name] or op in pushes[0].lost[dies.name]
    assert max(seconds) < BOUND_S
    for k in (2, 3):
        trainer.serves(trainer.servers[k], 2)


def test_a_version_on_disk_goes_to_who_comes_later_though_the_trainer_has_other_weights(
    pair: Trainer, models: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "served").symlink_to(models[0])
    described = [server.described for server in pair.servers]
    pushes = [(1, pair.file(1), [0]), (1, pair.file(2), [1])]
    work = "tests.sync.work_push:push"
    how = {"servers": described, "pushes": pushes, "folder": tmp_path}
    ranks = pair.pool.run(work, world=2, stages=2, **how)
    steps = ranks[0]["steps"]
    assert [(error, push.lost) for error, push, _ in steps] == [(None, {})] * 2
    first, second = (push.receipt for _, push, _ in steps)
    assert (second.digest, second.num_bytes) == (first.digest, first.num_bytes)
    assert (first.calls > 0, second.calls) == (True, 0)  # nothing was sent again
    for server in pair.servers:
        pair.serves(server, 1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"served", ".megarl-lock", "version_1"}


@pytest.mark.slow
def test_weights_in_fp8_and_layers_behind_the_last_take_the_same_ways(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """DeepSeek's, with codes, scales and multi-token prediction; servers hold what was sent."""
    source = save_model("deepseek_v3", tmp_path / "source", **wide("deepseek_v3"))
    (first, _, _), (second, _, _) = (in_fp8(source, tmp_path / str(k), k) for k in (1, 2))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "served").symlink_to(first)
    with several(first, tmp_path / "run", 1, context_length=16) as [server]:
        trainer = Trainer(pool, [first, second], [server])
        for way in ({"colocated": True}, {"folder": tmp_path / "weights"}):
            server.reload(first)
            pushes, _, _ = trainer.push([0], [0], [0], stages=2, max_bytes=2**18, **way)
            assert [push.lost for push in pushes] == [{}] * 3
            trainer.serves(server, 3)
    config = json.loads((tmp_path / "weights" / "version_3" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
