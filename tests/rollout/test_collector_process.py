"""The process of a collector: its start, its end, and what it is given on the way."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import ConfigError, DataError, RunError
from megarl.rollout.collector import Collector
from megarl.rollout.collector_process import Work
from megarl.rollout.messages import error_from_json, error_to_json, request_to_json
from megarl.rollout.process import lives
from megarl.types import Sampling
from tests.rollout.collecting import KEY, REWARDS, request, settings_in, taken, write_folder
from tests.rollout.offspring import children_of, ends_with, gone, started_by_reward
from tests.rollout.rewards import grading, mixed
from tests.rollout.scripted import EOS, VOCAB, Server, in_thread


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("collector"), VOCAB, EOS)


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Collector]:
    """It is started like a rank's: with what torchrun tells ranks in its environment."""
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node", "TORCHELASTIC_RUN_ID": "x"}
    before = dict(os.environ)
    os.environ.update(torchrun)
    made = Collector(settings_in(folder))
    os.environ.clear()
    os.environ.update(before)
    yield made
    made.close()


def test_it_is_no_member_of_the_trainers_world_and_has_no_secret_in_its_arguments(
    started: Collector,
) -> None:
    process = Path(f"/proc/{started.pid}")
    environment = process.joinpath("environ").read_bytes()
    for name in (b"RANK=", b"WORLD_SIZE=", b"MASTER_ADDR=", b"TORCHELASTIC_"):
        assert name not in environment
    assert KEY.encode() not in process.joinpath("cmdline").read_bytes() + environment
    assert KEY not in started.settings.log_file.read_text()
    assert started.settings.log_file.stat().st_mode & 0o077 == 0


def test_k2_it_listens_nowhere(started: Collector) -> None:
    inodes = {
        target.rpartition("[")[2].rstrip("]")
        for fd in Path(f"/proc/{started.pid}/fd").iterdir()
        if (target := os.readlink(fd)).startswith("socket:")
    }
    listening = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{started.pid}/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert not [fields for fields in listening if fields[9] in inodes]


def test_its_death_is_told_with_its_exit_and_the_end_of_its_log(
    folder: Path, tmp_path: Path
) -> None:
    made = Collector(settings_in(folder, log_file=tmp_path / "collector_3.log"))
    made.serve_from([])
    made.issue([request(0)])
    os.kill(made.pid, 9)
    start = time.monotonic()
    made.wait(1, 30.0)
    with pytest.raises(RunError, match=r"signal SIGKILL; end of .*collector_3\.log"):
        made.take()
    with pytest.raises(RunError, match="SIGKILL"):
        made.recall()
    with pytest.raises(RunError, match="SIGKILL"):
        made.evaluate([request(0).prompt], Sampling(1.0, 4), area="eval")
    assert time.monotonic() - start < 10
    made.close()


def test_it_leaves_signals_to_the_trainer_and_what_had_come_is_taken_before_its_death_is_told(
    folder: Path, tmp_path: Path
) -> None:
    """SIGTERM and SIGINT go to all processes of a job that is stopped, SIGKILL is meant for it.
    What a reward is doing meanwhile outlives the former, and ends with the latter.
    """
    log = tmp_path / "collector_3.log"
    made = Collector(settings_in(folder, reward=f"{REWARDS}deadly", log_file=log))
    server = Server()
    with in_thread(server):
        made.serve_from([server.member])
        made.recall()  # it is ready
        job = [made.pid, *children_of(made.pid)]
        assert len(job) == 2
        made.resume()
        made.issue([request(serial) for serial in range(5)])
        made.wait(5, 60.0)
        made.issue([ends_with(request(5, deed="children"))])
        (family,) = started_by_reward(log)
        for number in (signal.SIGINT, signal.SIGTERM):
            for pid in [*job, family[0]]:
                os.kill(pid, number)
        time.sleep(0.2)
        assert all(map(lives, [*job, *family]))
        os.kill(made.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while made._error is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(made.take()) == 5
        with pytest.raises(RunError, match="SIGKILL"):
            made.take()
        gone(*job, *family)
    made.close()


def test_it_ends_with_the_trainer_however_that_ends(folder: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from megarl.rollout.collector import Collector\n"
        "from tests.rollout.collecting import settings_in\n"
        "made = Collector(settings_in(Path(sys.argv[1])))\n"
        "made.recall()\n"  # it is ready
        "print(made.pid, flush=True)\n"
        "made.wait(1, 60.0)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    assert lives(pid)
    job = [pid, *children_of(pid)]
    trainer.kill()
    trainer.wait()
    gone(*job)


def test_what_keeps_it_from_starting_is_said(folder: Path) -> None:
    made = Collector(settings_in(folder, reward=f"{REWARDS}nothing"))
    made.wait(1, 60.0)
    with pytest.raises(ConfigError, match=r"data\.reward: found import:tests\.rollout") as found:
        made.take()
    assert [problem.key for problem in found.value.problems] == ["data.reward"]
    made.close()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"key_file": Path("/nowhere/key")}, ConfigError, "rollout.key_file: found /nowhere/key"),
        ({"hf": Path("/nowhere")}, DataError, "/nowhere is no folder"),
    ],
)
def test_errors_cross_as_what_they_are(
    folder: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as found:
        Work(settings_in(folder, **changes), lambda *_: None, grading(mixed))
    again = error_from_json(json.loads(json.dumps(error_to_json(found.value))))
    assert type(again) is error and str(again) == str(found.value)


def test_a_process_that_does_not_get_ready_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.rollout.collector.START_TIMEOUT_S", 0.3)
    made = Collector(settings_in(folder))
    os.kill(made.pid, signal.SIGSTOP)
    start = time.monotonic()
    for call in (lambda: made.wait(1, 60.0), made.recall):
        with pytest.raises(RunError, match=r"not ready within 0\.3 s"):
            call()
    assert time.monotonic() - start < 5
    monkeypatch.setattr("megarl.rollout.collector._CLOSE_TIMEOUT_S", 0.2)
    made.close()
    assert not lives(made.pid)


def test_a_reward_that_is_none_ends_the_run_and_names_the_sample(folder: Path) -> None:
    said: list[Any] = []

    async def run() -> None:
        server = Server()
        work = Work(settings_in(folder), lambda m, _=(): said.append(m), grading(mixed))
        async with server.running():
            work.handle({"do": "serve_from", "members": [asdict(server.member)], "version": 0})
            requests = [request(0, reward=1.0), request(1, reward="none")]
            work.handle({"do": "issue", "requests": [request_to_json(r) for r in requests]})
            while len(said) < 2:
                await asyncio.sleep(0.01)
            await work.close()

    asyncio.run(run())
    (error,) = [m["error"] for m in said if "error" in m]
    found = error_from_json(error)
    assert isinstance(found, DataError)
    assert re.match(r"the reward of sample p1/\d is NoneType None", str(found))


def test_when_it_ends_servers_have_none_of_its_requests(folder: Path) -> None:
    async def never(server: Server, request: Any, body: Any) -> Any:
        await asyncio.sleep(60)

    async def run() -> Server:
        server = Server(script=never)
        work = Work(settings_in(folder), lambda *_: None, grading(mixed))
        async with server.running():
            work.handle({"do": "serve_from", "members": [asdict(server.member)], "version": 0})
            requests = [request_to_json(request(n)) for n in range(6)]
            work.handle({"do": "issue", "requests": requests})
            while server.open < 6:
                await asyncio.sleep(0.01)
            await work.close()
        return server

    server = asyncio.run(run())
    asked = [rid for body in server.bodies for rid in body["rid"]]
    assert sorted(server.aborted) == sorted(asked) and len(asked) == 24


def test_what_is_not_understood_ends_the_run_and_not_silently(folder: Path) -> None:
    said: list[Any] = []
    Work(settings_in(folder), said.append, grading(mixed)).handle({"do": "dance"})
    ((error,),) = [list(message.values()) for message in said]
    assert str(error_from_json(error)) == "the collector failed: KeyError: 'dance'"


def test_one_that_stands_still_is_given_up_in_bounded_time(folder: Path) -> None:
    """Not while there is nothing that it could do."""
    server = Server(script=None)
    patience: dict[str, Any] = {"request_timeout_s": 0.4, "reward_timeout_s": 0.2}
    standing = Collector(settings_in(folder, max_attempts=1, **patience))
    # asked twice in vain, then four rewards that nearly take too long
    groups = [request(0, group=3), request(1, group=4)]
    assert standing._patience_s(groups) == pytest.approx(2 * 0.4 + 4 * 0.2)
    try:
        with in_thread(server):
            standing.serve_from([server.member])
            standing.issue([request(0, group=1)])
            assert list(taken(standing, 1)) == [0]
            os.kill(standing.pid, signal.SIGSTOP)
            time.sleep(1.2)
            assert standing.take() == []  # it has nothing to do
            standing.serve_from([])
            standing.issue([request(1, group=1)])
            time.sleep(1.2)
            assert standing.take() == []  # nor anybody to ask
            standing.serve_from([server.member])
            assert standing.take() == []
            time.sleep(1.2)
            with pytest.raises(RunError, match=r"ended none of 1 groups for 1 s; see "):
                standing.take()
    finally:
        os.kill(standing.pid, signal.SIGKILL)
        standing.close()
