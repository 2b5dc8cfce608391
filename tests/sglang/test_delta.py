"""Pushes of what changed to a real SGLang server: less is sent, and it serves the same."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.rollout.control import ServerControl
from megarl.types import Push
from tests.helpers.dist import WorkerPool
from tests.sglang.conftest import Models
from tests.sglang.protocol import generate, ok, prompt_logprobs
from tests.sglang.server import SGLangServer, require_sglang
from tests.sglang.test_push import described
from tests.sync.servers import Server, digests_of, proxied

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.timeout(1500)]

SHARE = 0.02  # of elements that change from one version to the next
WAYS = ({"max_bytes": 2**18}, {"max_bytes": 100_000, "handles": True})
ways = pytest.mark.parametrize("way", WAYS, ids=["groups", "handles"])
Send = Callable[..., list[Push]]


@pytest.fixture(scope="module")
def versions(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights, and what became of them, some elements at a time: by steps of the bit pattern in
    every second tensor, by more in the others.
    """
    folder = tmp_path_factory.mktemp("versions")
    tensors = load_file(tiny_models.a / "model.safetensors")
    chance, found = torch.Generator().manual_seed(5), []
    for version in range(4):
        for k, tensor in enumerate(tensors.values()):
            hit = torch.rand(tensor.shape, generator=chance) < (SHARE if version else 0)
            if k % 2:
                tensor.view(torch.int32)[hit] += 3
            else:
                tensor[hit] += 0.05
        found.append(folder / f"{version}")
        found[-1].mkdir()
        save_file(tensors, found[-1] / "model.safetensors")
    return found


class Served(NamedTuple):
    real: SGLangServer
    ranks: int
    version: str = ""  # where it has to prove itself

    @property
    def described(self) -> dict[str, Any]:
        return {**described(self.real), "ranks": self.ranks, "version": self.version}

    def control(self, op: str) -> dict[str, str]:
        told = ServerControl(self.real.url, self.real.key).control(op, {}, 30)["digests"]
        assert isinstance(told, dict)
        return told

    def serves(self, model: Path, version: int) -> None:
        assert self.control("digest") == digests_of(model)
        reply = generate(self.real, num_tokens=2)
        assert reply["meta_info"]["weight_version"] == str(version)


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"]
)
def server(
    request: pytest.FixtureRequest, tiny_models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    if request.param == 1:
        yield Served(request.getfixturevalue("sglang_server"), 1)
        return
    require_sglang()
    log = tmp_path_factory.mktemp("tp2") / "server.log"
    two = {"extra_args": ("--tp-size", "2"), "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    with SGLangServer(tiny_models.a, log_path=log, **two) as real:
        yield Served(real, 2)


@pytest.fixture
def send(pool: WorkerPool, versions: list[Path]) -> Send:
    """Pushes of versions to one server, all of one trainer."""

    def send(server: dict[str, Any], *wanted: int, **options: Any) -> list[Push]:
        pushes = [(k, versions[k] / "model.safetensors", [0]) for k in wanted]
        work = "tests.sync.work_push:push"
        options = {"delta": True, "servers": [server], "pushes": pushes, **options}
        [rank] = pool.run(work, world=1, stages=1, **options)
        assert [error for error, *_ in rank["steps"]] == [None] * len(wanted)
        return [step[1] for step in rank["steps"]]

    return send


def sizes(pushes: list[Push]) -> list[int]:
    assert [push.lost for push in pushes] == [{}] * len(pushes)
    return [push.receipt.num_bytes for push in pushes if push.receipt]


@pytest.fixture(scope="module")
def whole(versions: list[Path]) -> int:
    """Bytes of all weights."""
    return sum(t.nbytes for t in load_file(versions[0] / "model.safetensors").values())


def copies(server: SGLangServer) -> list[tuple[int, int]]:
    """(inode, bytes) of the memory in which processes of the server keep weights, each once."""
    assert server._process is not None
    return _kept_by(_descendants(server._process.pid))


def _kept_by(pids: Iterable[int]) -> list[tuple[int, int]]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(entry).startswith("/memfd:megarl-shadow"):
                    told = entry.stat()
                    found.add((told.st_ino, told.st_blocks * 512))
    return sorted(found)


def _running() -> list[str]:
    return [path.name for path in Path("/proc").glob("[0-9]*")]


def _descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [*children, *(other for child in children for other in _descendants(child))]


@ways
def test_only_what_changed_is_sent_and_the_server_computes_as_after_whole_pushes(
    send: Send, server: Served, versions: list[Path], way: dict[str, Any], whole: int
) -> None:
    """The last push is of the same weights, whole, by a trainer that sends no changes. The server's
    ranks keep one copy of the weights, until it has none of them any more.
    """
    first, second, third, same = sizes(send(server.described, 0, 1, 2, 2, **way))
    assert first >= whole
    # A byte of place and 4 of value for an element, and some for each block and name.
    most = whole / 4 * SHARE * 1.5 * 5 + 2 * whole / 1024 + 2**16
    assert second < most and third < most and same < 2**16
    server.serves(versions[2], 2)
    assert server.control("held") == digests_of(versions[2])
    [(_, size)] = copies(server.real)
    assert whole < size < 1.2 * whole
    found = prompt_logprobs(server.real)
    assert sizes(send(server.described, 2, delta=False, **way))[0] >= whole
    assert prompt_logprobs(server.real) == found
    assert copies(server.real) == []
    assert server.control("held") == {}


def test_what_a_server_proves_with_changes_is_what_it_proves_without(
    send: Send, server: Served, versions: list[Path], whole: int
) -> None:
    """The first push is made twice, and of the second, a change, nothing is to be proven."""
    proving = server._replace(version="sglang 0.5.23").described
    first, second, third = sizes(send(proving, 1, 2, 3))
    assert first >= whole and second < whole / 3 and third < whole / 3
    server.serves(versions[3], 3)


@ways
def test_a_change_of_what_is_not_held_is_refused_and_the_server_lives_on(
    send: Send,
    server: Served,
    versions: list[Path],
    tiny_models: Models,
    way: dict[str, Any],
    whole: int,
) -> None:
    """Files are loaded into it after it has said that it holds version 1."""
    real = Server("sglang", server.real.url, server.real.key, 0, multiprocessing.Process())
    asked = []

    def then_loaded(status: int, reply: Any) -> tuple[int, Any]:
        asked.append(reply)
        if len(asked) == 3:  # held, digest, held
            ok(server.real, "/update_weights_from_disk", model_path=str(tiny_models.b))
        return status, reply

    with proxied(real, "/weights_checker", then_loaded, times=10**6) as proxy:
        pushes = send({**server.described, "url": proxy.url}, 1, 2, 3, **way)
    assert [list(push.lost) for push in pushes] == [[], ["sglang"], []]
    assert "came as a change of" in pushes[1].lost["sglang"]
    assert "what is held is unknown" in pushes[1].lost["sglang"]
    assert pushes[2].receipt is not None and pushes[2].receipt.num_bytes >= whole
    server.serves(versions[3], 3)


def test_weights_that_come_from_files_are_not_held(
    send: Send, server: Served, versions: list[Path], tiny_models: Models, whole: int
) -> None:
    sizes(send(server.described, 1, 2))
    expected = digests_of(versions[2])
    assert server.control("held") == expected
    ok(server.real, "/update_weights_from_disk", model_path=str(tiny_models.b))
    assert server.control("held") == {}
    assert server.control("digest") == digests_of(tiny_models.b)
    first, second = sizes(send(server.described, 2, 3))
    assert first >= whole > 3 * second
    server.serves(versions[3], 3)


@pytest.mark.slow
def test_another_process_in_its_place_gets_everything_and_leaves_nothing_when_it_is_killed(
    send: Send,
    sglang_server: SGLangServer,
    tiny_models: Models,
    versions: list[Path],
    whole: int,
    tmp_path: Path,
) -> None:
    """After the second push the server is another one, at the same address."""
    require_sglang()
    before = set(os.listdir("/dev/shm"))
    log = tmp_path / "server.log"
    other = SGLangServer(tiny_models.a, log_path=log, key=sglang_server.key)
    old = Server("sglang", sglang_server.url, sglang_server.key, 0, multiprocessing.Process())
    new = Server("sglang", other.url, other.key, 0, multiprocessing.Process())
    versions_told = []

    with other:

        def restarted(status: int, reply: Any) -> tuple[int, Any]:
            versions_told.append(reply)
            if len(versions_told) == 2:
                proxy.target = new
            return status, reply

        with proxied(old, "/continue_generation", restarted, times=10**6) as proxy:
            server = {**described(sglang_server), "url": proxy.url}
            first, second, third, fourth = sizes(send(server, 0, 1, 2, 3, handles=True))
        assert first >= whole and third >= whole and max(second, fourth) < whole / 3
        Served(other, 1).serves(versions[3], 3)
        Served(sglang_server, 1).serves(versions[1], 1)
        assert other._process is not None
        pids = _descendants(other._process.pid)
        [(inode, _)] = copies(other)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}/fd/0").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert inode not in {found for found, _ in _kept_by(map(int, _running()))}
    assert {name for name in os.listdir("/dev/shm") if "megarl" in name} <= before
