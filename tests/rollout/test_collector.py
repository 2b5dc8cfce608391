"""A collector and its process: requests in, scored groups out, over a socket."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.errors import RunError
from megarl.protocols import Collector as CollectorProtocol
from megarl.rollout.collector import Collector, CollectorSettings
from megarl.types import GroupOutcome, GroupRequest, Prompt, Sampling, VersionSpan
from tests.rollout.scripted import (
    EOS,
    SHAPE,
    VOCAB,
    Server,
    in_thread,
    logprob_of,
    respond,
    routing_of,
)
from tests.rollout.spelling import write_tokenizer

BUDGET = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("collector")
    write_tokenizer(made, VOCAB, EOS)
    (made / "key").write_text("secret-key\n")
    (made / "key").chmod(0o600)
    return made


def settings_in(folder: Path, **changes: Any) -> CollectorSettings:
    given: dict[str, Any] = {
        "hf": folder,
        "eos_ids": (EOS,),
        "reward": "import:tests.rollout.rewards:even_length",
        "key_file": folder / "key",
        "log_file": folder / "logs" / "collector_0.log",
        "routing": SHAPE,
    }
    return CollectorSettings(**(given | changes))


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Collector]:
    made = Collector(settings_in(folder))
    yield made
    made.close()


@pytest.fixture
def collector(shared: Collector) -> Iterator[Collector]:
    """The module's collector, without servers and without groups; left so again."""
    yield shared
    shared.serve_from([])
    shared.suspects()
    assert shared.take() == []


def request(serial: int, *, group: int = 4, prompt: int = 3) -> GroupRequest:
    asked = Prompt(f"p{serial}", tuple(range(2, 2 + prompt)), {"answer": serial % 2})
    seeds = tuple(1000 * serial + i for i in range(group))
    return GroupRequest(serial, 1, asked, seeds, Sampling(1.0, BUDGET))


def taken(collector: Collector, count: int, timeout_s: float = 60.0) -> dict[int, GroupOutcome]:
    """``count`` outcomes by serial, as they come."""
    found: dict[int, GroupOutcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        collector.wait(1, 1.0)
        found |= {outcome.serial: outcome for outcome in collector.take()}
        collector.suspects()
    return found


def check(outcome: GroupOutcome, asked: GroupRequest, version: int = 0) -> None:
    assert (outcome.failed, outcome.discarded) == ("", False)
    prompt = list(asked.prompt.token_ids)
    for index, (seed, s) in enumerate(zip(asked.seeds, outcome.samples, strict=True)):
        response, finish = respond(len(prompt), seed, BUDGET)
        assert (s.prompt_id, s.group, s.serial) == (asked.prompt.id, asked.serial, asked.serial)
        assert (s.index, s.truncated) == (index, finish == "length")
        assert s.tokens.tolist() == [*prompt, *response]
        assert s.mask.tolist() == [False] * len(prompt) + [True] * len(response)
        expected = [0.0] * len(prompt) + [logprob_of(t) for t in response]
        assert s.rollout_logprobs.tolist() == expected
        right = finish == "stop" and (len(response) - 1) % 2 == asked.prompt.payload["answer"]
        assert (s.rewards.tolist(), s.correct) == ([float(right)], right)
        assert s.version_spans == (VersionSpan(version, 0, len(response), "server 0"),)
        assert s.routing is not None and s.routing.dtype == np.uint16
        np.testing.assert_array_equal(s.routing, routing_of([*prompt, *response]))


def test_groups_come_back_scored(collector: Collector) -> None:
    held: CollectorProtocol = collector  # it is one
    server = Server(version=7)
    with in_thread(server):
        held.serve_from([server.member])
        requests = [request(serial) for serial in range(20)]
        held.issue(requests)
        found = taken(collector, 20)
        for asked in requests:
            check(found[asked.serial], asked, version=7)
        assert server.keys == {"Bearer secret-key"}
    assert collector.reward_names == ("reward",)


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
    assert time.monotonic() - start < 10
    made.close()


def test_a_recall_takes_everything_back_until_it_resumes(collector: Collector) -> None:
    """Every response is aborted after 4 tokens, then goes on."""
    import asyncio

    released = asyncio.Event()

    async def held_back(server: Server, request: Any, body: Any) -> Any:
        while not set(body["rid"]) <= set(server.aborted) and not released.is_set():
            await asyncio.sleep(0.01)
        return server.replies(body, None if released.is_set() else 4)

    server = Server(script=held_back)
    with in_thread(server):
        collector.serve_from([server.member])
        requests = [request(serial) for serial in range(6)]
        collector.issue(requests)
        while server.open < 6:
            time.sleep(0.01)
        collector.recall()
        assert server.open == 0 and len(server.bodies) == 6
        collector.wait(6, 0.3)
        early = {o.serial: o for o in collector.take()}
        released.set()
        collector.resume()
        found = early | taken(collector, 6 - len(early))
        for asked in requests:
            check(found[asked.serial], asked)
        assert all(body["routed_experts_start_len"] == 6 for body in server.bodies[6:])
