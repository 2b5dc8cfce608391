"""A collector and its process: requests in, scored groups out, over a socket."""

import asyncio
import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megarl.errors import ServerError
from megarl.protocols import Collector as CollectorProtocol
from megarl.rollout.collector import Collector
from megarl.rollout.seeds import sample_seeds
from megarl.types import GroupOutcome, GroupRequest, Mean, Prompt, Sampling, Sum, VersionSpan
from tests.rollout.collecting import BUDGET, KEY, REWARDS, request, settings_in, taken, write_folder
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("collector"), VOCAB, EOS)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Collector]:
    given = {"routing": SHAPE, "max_attempts": 2, "reward": f"{REWARDS}mixed"}
    made = Collector(settings_in(folder, **given))
    yield made
    made.close()


@pytest.fixture
def collector(shared: Collector) -> Iterator[Collector]:
    """The module's collector, without servers and without groups; left so again."""
    yield shared
    shared.serve_from([])
    shared.resume()
    shared.suspects()
    assert shared.take() == []


def check(outcome: GroupOutcome, asked: GroupRequest, version: int = 0) -> None:
    assert (outcome.failed, outcome.discarded) == ("", False)
    prompt = list(asked.prompt.token_ids)
    for index, (seed, s) in enumerate(zip(asked.seeds, outcome.samples, strict=True)):
        response, finish = respond(len(prompt), seed, BUDGET)
        assert (s.prompt_id, s.group, s.serial) == (asked.prompt.id, asked.serial, asked.serial)
        assert (s.index, s.truncated) == (index, finish == "length")
        assert s.tokens.tolist() == [*prompt, *response]
        assert s.mask.tolist() == [False] * len(prompt) + [True] * len(response)
        expected = [0.0] * len(prompt) + [logprob_of(t, version) for t in response]
        assert s.rollout_logprobs.tolist() == expected
        right = finish == "stop" and (len(response) - 1) % 2 == asked.prompt.payload["answer"]
        assert (s.rewards.tolist(), s.correct) == ([float(right)], right)
        assert s.version_spans == (VersionSpan(version, 0, len(response), "server 0"),)
        assert s.routing is not None and s.routing.dtype == np.uint16
        rows = [version] * (len(prompt) + len(response) - 1)
        np.testing.assert_array_equal(s.routing, routing_of([*prompt, *response], rows))


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
        assert server.keys == {f"Bearer {KEY}"}
    assert collector.reward_names == ("reward",)


def test_what_comes_over_can_be_worked_on_and_is_not_shared(collector: Collector) -> None:
    server = Server()
    with in_thread(server):
        collector.serve_from([server.member])
        collector.issue([request(0), request(1)])
        outcomes = taken(collector, 2)
    before = outcomes[1].samples[0].tokens.copy()
    for sample in outcomes[0].samples:
        for array in (sample.tokens, sample.mask, sample.rollout_logprobs, sample.routing):
            assert array is not None and array.flags.writeable and array.flags.aligned
            array.fill(0)
    assert (outcomes[1].samples[0].tokens == before).all()


@pytest.mark.parametrize(
    "payload",
    [
        {"answer": 0, "deep": [{"a": None}, [1.5, "x"]], "": True},
        {"answer": 0, "text": 'quo"te\n\u2028 \U0001f600 \ud800'},
        {"answer": 0, "large": 2**200, "small": -(2**70)},
    ],
    ids=["nested", "text", "numbers"],
)
def test_a_payload_reaches_the_reward_as_it_was(collector: Collector, payload: Any) -> None:
    server = Server()
    with in_thread(server):
        collector.serve_from([server.member])
        (asked,) = requests = [request(0, **payload)]
        collector.issue(requests)
        check(taken(collector, 1)[0], asked)


def test_waiting_ends_by_its_time(collector: Collector) -> None:
    collector.issue([request(0)])
    start = time.monotonic()
    collector.wait(1, 0.2)
    assert 0.15 < time.monotonic() - start < 2 and collector.take() == []
    server = Server()
    with in_thread(server):
        collector.serve_from([server.member])
        check(taken(collector, 1)[0], request(0))


def test_a_recall_takes_everything_back_until_it_resumes(collector: Collector) -> None:
    """Every response is aborted after 4 tokens, then goes on."""
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
        assert len(server.bodies) == 6
        released.set()
        collector.resume()
        found = early | taken(collector, 6 - len(early))
        for asked in requests:
            check(found[asked.serial], asked)
        assert all(body["routed_experts_start_len"] == 6 for body in server.bodies[6:])


def test_f2_what_has_ended_stays_until_it_is_taken(collector: Collector) -> None:
    """Nobody takes 9 groups when they end: they are there for the next one who asks."""
    server = Server()
    with in_thread(server):
        collector.serve_from([server.member])
        collector.issue([request(serial) for serial in range(9)])
        deadline = time.monotonic() + 30
        ready: list[GroupOutcome] = []
        while len(ready) < 9:
            assert time.monotonic() < deadline
            collector.wait(9 - len(ready), 1.0)
            ready += collector.take()
        assert sorted(o.serial for o in ready) == list(range(9))
        collector.recall()
        assert collector.take() == []
        collector.resume()


def test_failures_come_back_as_outcomes_and_suspects(collector: Collector) -> None:
    async def script(server: Server, request: Any, body: Any) -> Any:
        if body["input_ids"][0][0] != 2:
            return web.json_response({"error": "no such token"}, status=400)
        return web.json_response({"error": "oom"}, status=500)

    server = Server(script=script)
    with in_thread(server):
        collector.serve_from([server.member])
        refused = replace(request(1), prompt=Prompt("q", (3, 4), {"answer": 0}))
        collector.issue([refused])
        (outcome,) = taken(collector, 1).values()
        assert outcome.samples == () and 'HTTP 400: {"error": "no such token"}' in outcome.failed
        collector.issue([request(2)])
        while not (suspects := collector.suspects()):
            collector.wait(1, 1.0)
        assert suspects == {server.member: 'HTTP 500: {"error": "oom"}'}
        assert collector.suspects() == {}
        outcome = taken(collector, 1)[2]
        assert outcome.attempts == 2 and outcome.failed.startswith("failed 2 times, the last time")


def test_servers_change_while_groups_are_under_way(collector: Collector) -> None:
    async def never(server: Server, request: Any, body: Any) -> Any:
        await asyncio.sleep(60)

    gone, serving = Server(script=never), Server()
    with in_thread(gone, serving):
        collector.serve_from([gone.member])
        requests = [request(serial) for serial in range(5)]
        collector.issue(requests)
        while gone.open < 5:
            time.sleep(0.01)
        collector.serve_from([serving.member])
        found = taken(collector, 5)
        for asked in requests:
            check(found[asked.serial], asked)
            assert found[asked.serial].attempts == 2
        assert len(gone.aborted) == 20


# --- routing is probed ----------------------------------------------------------------------------


def without(field: str) -> Any:
    async def script(server: Server, request: Any, body: Any) -> Any:
        replies = server.replies(body)
        for reply in replies:
            reply["meta_info"].pop(field)
        return replies

    return script


async def refusing(server: Server, request: Any, body: Any) -> Any:
    return web.json_response({"error": "return_routed_experts: not enabled"}, status=400)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, ""),
        (without("routed_experts"), "found no routed_experts"),
        (refusing, "HTTP 400.*not enabled"),
    ],
)
def test_a_server_that_does_not_report_is_found_at_the_start(
    collector: Collector, script: Any, words: str
) -> None:
    servers = [Server(), Server(script=script, name="server 1")]
    with in_thread(*servers):
        collector.serve_from([server.member for server in servers])
        if not words:
            collector.probe_routing([3, 4, 5])
        else:
            with pytest.raises(ServerError, match=words) as refusal:
                collector.probe_routing([3, 4, 5])
            said = str(refusal.value)
            assert said.startswith("moe.routing_replay=rollout: server 1 (http://127.0.0.1:")
            assert "--enable-return-routed-experts" in said
        for server in servers:
            (body,) = server.bodies
            assert body["return_routed_experts"] is True
            assert body["sampling_params"][0]["max_new_tokens"] == 1


# --- evaluation -----------------------------------------------------------------------------------


def test_an_evaluation_samples_as_it_says_and_nothing_of_it_is_taken(collector: Collector) -> None:
    server = Server()
    prompts = [request(serial).prompt for serial in range(7)]
    sampling = Sampling(0.6, 6, top_p=0.95, top_k=20, min_p=0.01)
    given: dict[str, Any] = {"area": "eval/own", "samples_per_prompt": 3, "pass_at": (1, 2, 3)}
    with in_thread(server):
        collector.serve_from([server.member])
        found = {m.name: m.value for m in collector.evaluate(prompts, sampling, **given)}
        first, server.bodies = server.bodies, []
        collector.issue([request(50)])
        again = {m.name: m.value for m in collector.evaluate(prompts, sampling, **given)}
        check(taken(collector, 1)[50], request(50))
        second = [body for body in server.bodies if len(body["rid"]) == 3]
    assert found == again and set(found) >= {"eval/own/accuracy", "eval/own/truncated"}
    seeds = [[p["sampling_seed"] for p in body["sampling_params"]] for body in first]
    assert sorted(seeds) == sorted(
        [p["sampling_seed"] for p in body["sampling_params"]] for body in second
    )
    assert len({seed for group in seeds for seed in group}) == 21
    right = []
    for serial, own in enumerate(sample_seeds(0, 0, prompts, 3)):
        assert own in seeds
        responses = [respond(3, seed, 6) for seed in own]
        right.append([f == "stop" and (len(t) - 1) % 2 == serial % 2 for t, f in responses])
    assert found["eval/own/accuracy"] == Mean(sum(map(sum, right)), 21)
    for k in (1, 2, 3):
        subsets = [list(itertools.combinations(group, k)) for group in right]
        passed = sum(sum(map(any, subset)) / len(subset) for subset in subsets)
        value = found[f"eval/own/pass@{k}"]
        assert isinstance(value, Mean) and value.count == 7
        assert value.total == pytest.approx(passed)
    for body in first:
        assert "return_routed_experts" not in body
        for params in body["sampling_params"]:
            kept = {k: params[k] for k in ("temperature", "top_p", "top_k", "min_p")}
            assert kept == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01}


def test_an_evaluation_is_of_the_prompts_that_could_be_sampled(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts of five tokens are refused, those of four get no answer."""

    async def picky(server: Server, request: Any, body: Any) -> Any:
        status = {5: 400, 4: 500}.get(len(body["input_ids"][0]))
        return status and web.Response(status=status, text="no such prompt")

    server = Server(script=picky)
    lengths = (3, 5, 3, 4, 3, 5)
    prompts = [request(n, prompt=length).prompt for n, length in enumerate(lengths)]
    given: dict[str, Any] = {"area": "eval/own", "samples_per_prompt": 2, "pass_at": (2,)}
    with in_thread(server):
        collector.serve_from([server.member])
        found = {m.name: m.value for m in collector.evaluate(prompts, Sampling(1.0, 6), **given)}
    right = []
    for n, own in enumerate(sample_seeds(0, 0, prompts, 2)):
        if lengths[n] == 3:
            responses = [respond(3, seed, 6) for seed in own]
            right.append([f == "stop" and (len(t) - 1) % 2 == n % 2 for t, f in responses])
    assert found["eval/own/failed"] == Sum(2 * 3)
    assert found["eval/own/samples"] == Sum(2 * 3)
    assert found["eval/own/accuracy"] == Mean(sum(map(sum, right)), 2 * 3)
    assert found["eval/own/pass@2"] == Mean(sum(map(any, right)), 3)
    (told,) = [r.message for r in caplog.records if "prompts failed" in r.message]
    assert re.match(r"eval/own: 3 of 6 prompts failed, the last one p\d: .*no such prompt", told)


def test_an_evaluation_of_which_nothing_can_be_had_says_why(collector: Collector) -> None:
    server = Server(script=refusing)
    prompts = [request(n).prompt for n in (3, 4)]
    with in_thread(server):
        collector.serve_from([server.member])
        words = r"eval: 2 of 2 prompts failed, the last one p[34]: server 0 .* HTTP 400"
        with pytest.raises(ServerError, match=words):
            collector.evaluate(prompts, Sampling(1.0, 4), area="eval")


def test_slow_rewards_do_not_keep_requests_from_being_answered(collector: Collector) -> None:
    """Rewards take 0.2 s a response and run one after the other; servers are done long before."""
    server = Server()
    requests = [request(n, group=2, reward=1.0, sleep=0.2) for n in range(5)]
    scored = [respond(3, s, BUDGET)[1] == "stop" for r in requests for s in r.seeds]
    assert sum(scored) >= 3, "choose other seeds"
    with in_thread(server):
        collector.serve_from([server.member])
        start = time.monotonic()
        collector.issue(requests)
        while len(server.bodies) < 5:
            time.sleep(0.005)
        asked = time.monotonic() - start
        taken(collector, 5)
        spent = time.monotonic() - start
    assert spent >= 0.2 * sum(scored) and asked < spent / 2
