"""Which server is asked, and what becomes of requests when servers come, go and fail."""

import asyncio
import gc
import itertools
import time
from asyncio import Future
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from megarl.rollout.pool import GARBAGE_IN_A_ROW, Pool
from megarl.rollout.sampler import Sampled, sample_group
from megarl.types import Completion, GroupRequest, Sampling
from tests.rollout.scripted import Server
from tests.rollout.test_sampler import PROMPT, check_whole, pool_of, request, rules
from tests.rollout.test_sampler_failures import failing

Test = Callable[[Any], Awaitable[None]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.sampler._BACK_OFF_S", 0.005)
    monkeypatch.setattr("megarl.rollout.pool._PAUSE_S", 0.01)


class Gate:
    """A script that holds every request back until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, server: Server, request: web.Request, body: Any) -> Any:
        await self.opened.wait()
        return None


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def sampling(pool: Pool, asked: GroupRequest, **options: Any) -> "asyncio.Task[Sampled]":
    return asyncio.ensure_future(sample_group(asked, pool, rules(**options)))


def of_length(serial: int, prompt: int, budget: int) -> GroupRequest:
    asked = type(PROMPT)("p", tuple(range(2, 2 + prompt)), {})
    return GroupRequest(serial, 0, asked, (1, 2), Sampling(1.0, budget))


def test_the_server_with_the_fewest_outstanding_tokens_is_asked() -> None:
    """(prompt + budget) x 2 sequences: 40 + 160 at the first, 60 + ... at the second."""

    async def run() -> None:
        first, second = (Server(script=Gate(), name=n) for n in "ab")
        async with pool_of(first, second) as pool:
            tasks = []
            for prompt, budget, where in (
                (10, 70, first),  # 160 : 0
                (10, 20, second),  # 160 : 60
                (10, 35, second),  # 160 : 150
                (3, 2, second),  # 160 : 160
                (10, 10, first),  # equal: the one that was chosen longest ago
                (10, 10, second),
            ):
                before = len(where.bodies)
                tasks.append(sampling(pool, of_length(len(tasks), prompt, budget)))
                await until(lambda where=where, before=before: len(where.bodies) == before + 1)
            for server in (first, second):
                server.script.opened.set()  # type: ignore[union-attr]
            await asyncio.gather(*tasks)
            assert {s.outstanding for s in pool._servers.values()} == {0}

    asyncio.run(run())


def test_equal_servers_get_equal_shares_and_a_slow_one_less() -> None:
    async def run() -> None:
        servers = [Server(name=n) for n in "abc"]

        async def slowly(server: Server, request: web.Request, body: Any) -> Any:
            await asyncio.sleep(0.1 if server.name == "c" else 0.005)

        for server in servers:
            server.script = slowly
        async with pool_of(*servers, max_in_flight=8) as pool:
            await asyncio.gather(*(sampling(pool, request(n)) for n in range(60)))
        a, b, c = (len(server.bodies) for server in servers)
        assert a + b + c == 60 and c < 10 and abs(a - b) < 12

    asyncio.run(run())


def test_a_group_stays_where_it_was_while_that_server_serves() -> None:
    async def run() -> None:
        async def once(server: Server, request: web.Request, body: Any) -> Any:
            first = all(len(ids) == 3 for ids in body["input_ids"])
            return server.replies(body, 3 if first else None)

        servers = [Server(script=once, name=n) for n in "abc"]
        async with pool_of(*servers) as pool:
            found = await asyncio.gather(*(sampling(pool, request(n)) for n in range(9)))
        for sampled in found:
            check_whole(sampled, request())
            assert len({s.server for c in sampled.completions for s in c.version_spans}) == 1
        assert [len(server.bodies) for server in servers] == [6, 6, 6]

    asyncio.run(run())


def test_it_stays_even_where_others_are_less_busy() -> None:
    async def run() -> None:
        opened, gate = asyncio.Event(), Gate()

        async def script(server: Server, request: web.Request, body: Any) -> Any:
            if tuple(body["input_ids"][0][:3]) == PROMPT.token_ids:  # none of the others
                await opened.wait()
                return server.replies(body, 3 if len(body["input_ids"][0]) == 3 else None)
            return await gate(server, request, body)

        busy, idle = Server(script=script, name="a"), Server(name="b")
        async with pool_of(busy) as pool, idle.running():
            group = sampling(pool, request(0))
            others = [sampling(pool, of_length(n, 100, 100)) for n in range(1, 4)]
            await until(lambda: busy.open == 4)
            pool.serve_from([busy.member, idle.member])
            opened.set()
            check_whole(await group, request())
            assert len(busy.bodies) == 5 and idle.bodies == []
            gate.opened.set()
            await asyncio.gather(*others)

    asyncio.run(run())


@pytest.mark.parametrize("most", [4, 10, 1])
def test_no_more_sequences_are_in_flight_than_allowed(most: int) -> None:
    """A group of 4 is more than 1, and asked all the same, alone."""

    async def run() -> None:
        async def slowly(server: Server, request: web.Request, body: Any) -> Any:
            await asyncio.sleep(0.01)

        servers = [Server(script=slowly, name=n) for n in "ab"]
        async with pool_of(*servers, max_in_flight=most) as pool:
            await asyncio.gather(*(sampling(pool, request(n)) for n in range(12)))
        for server in servers:
            assert server.most_sequences == max(4, 4 * (most // 4))

    asyncio.run(run())


def test_groups_are_asked_for_in_their_order() -> None:
    async def run() -> None:
        server = Server(script=Gate())
        async with pool_of(server, max_in_flight=4) as pool:
            tasks = [sampling(pool, of_length(0, 1, 2))]
            await until(lambda: server.open == 1)
            order = [5, 3, 9, 4, 1]
            tasks += [sampling(pool, of_length(n, n + 1, 2)) for n in order]
            await asyncio.sleep(0.05)
            server.script.opened.set()  # type: ignore[union-attr]
            await asyncio.gather(*tasks)
        # two of two sequences each fit at once: as they were waiting, by serial
        assert [len(body["input_ids"][0]) - 1 for body in server.bodies[2:]] == [1, 3, 4, 9]

    asyncio.run(run())


def test_groups_wait_for_a_server_that_comes() -> None:
    async def run() -> None:
        async with pool_of() as pool:
            task = sampling(pool, request())
            await asyncio.sleep(0.1)
            assert not task.done()
            server = Server()
            async with server.running():
                pool.serve_from([server.member])
                check_whole(await task, request())

    asyncio.run(run())


def test_requests_of_a_server_that_is_taken_away_are_made_elsewhere() -> None:
    async def run() -> None:
        first, second = Server(script=Gate(), name="a"), Server(name="b")
        async with pool_of(first) as pool, second.running():
            tasks = [sampling(pool, request(n), attempts=1) for n in range(5)]
            await until(lambda: first.open == 5)
            pool.serve_from([second.member])
            for sampled in await asyncio.gather(*tasks):
                check_whole(sampled, request())
                assert sampled.attempts == 2
            asked = [rid for body in first.bodies for rid in body["rid"]]
            assert sorted(first.aborted) == sorted(asked) and len(asked) == 20
            assert pool.suspects == []

    asyncio.run(run())


def test_another_boot_is_another_server() -> None:
    async def run() -> None:
        server = Server(script=Gate())
        async with pool_of(server) as pool:
            task = sampling(pool, request())
            await until(lambda: server.open == 1)
            server.script = None
            again = type(server.member)(server.name, server.url, "the next boot")
            pool.serve_from([again])
            check_whole(await task, request())
            assert len(server.bodies) == 2 and pool.members == [again]
            pool.serve_from([again])  # nothing changes
            assert len(server.bodies) == 2

    asyncio.run(run())


def test_a_server_that_fails_is_told_of_and_avoided_and_others_are_asked_first() -> None:
    async def run() -> None:
        bad = failing(99, lambda s, r, b: web.Response(status=500, text="oom"), name="bad")
        good = Server(name="good")
        async with pool_of(bad, good) as pool:
            for n in range(6):
                check_whole(await sampling(pool, request(n)), request())
            assert {member for member, _ in pool.suspects} == {bad.member}
            assert {reason for _, reason in pool.suspects} == {"HTTP 500: oom"}
            assert len(bad.bodies) == len(pool.suspects) < 6

    asyncio.run(run())


@pytest.mark.parametrize("broken", [True, False])
def test_the_pause_after_a_failure_grows_and_one_request_at_a_time_tries_again(
    broken: bool,
) -> None:
    """Who is only busy is not suspected: to be asked for proof of life would not help."""

    async def run() -> None:
        times: list[float] = []

        async def fails(server: Server, request: web.Request, body: Any) -> Any:
            times.append(time.monotonic())
            assert server.open == 1
            return web.Response(status=500 if broken else 503) if len(times) <= 5 else None

        server = Server(script=fails)
        async with pool_of(server) as pool:
            first = sampling(pool, request(0), attempts=9)
            await until(lambda: pool._servers[server.member].failures == 1)
            others = [sampling(pool, request(n), attempts=9) for n in range(1, 4)]
            server.script = fails
            check_whole(await first, request())
            assert [reason for _, reason in pool.suspects] == ["HTTP 500: "] * 5 * broken
            pauses = [b - a for a, b in itertools.pairwise(times)][:5]
            for n, pause in enumerate(pauses):
                assert 0.8 * 0.01 * 2**n <= pause
            server.script = None
            await asyncio.gather(*others)

    asyncio.run(run())


def test_failures_that_happen_together_are_one() -> None:
    async def run() -> None:
        gate = Gate()

        async def breaks(server: Server, request: web.Request, body: Any) -> Any:
            await gate.opened.wait()
            assert request.transport is not None
            request.transport.abort()

        server = Server(script=breaks)
        async with pool_of(server) as pool:
            tasks = [sampling(pool, request(n)) for n in range(8)]
            await until(lambda: server.open == 8)
            server.script = None
            gate.opened.set()
            for sampled in await asyncio.gather(*tasks):
                check_whole(sampled, request())
            assert len(pool.suspects) == 1

    asyncio.run(run())


def test_garbage_is_told_of_when_it_repeats() -> None:
    async def run() -> None:
        server = failing(GARBAGE_IN_A_ROW - 1, lambda s, r, b: web.Response(text="?"))
        async with pool_of(server) as pool:
            check_whole(await sampling(pool, request()), request())
            assert pool.suspects == []
            server.script = failing(GARBAGE_IN_A_ROW + 2, lambda s, r, b: []).script
            server.bodies.clear()
            check_whole(await sampling(pool, request(), attempts=9), request())
            ((member, reason),) = pool.suspects
            assert member == server.member
            assert reason.startswith("3 wrong answers in a row; the last one: request ")

    asyncio.run(run())


def test_a_group_does_not_go_back_to_who_answered_wrongly_while_there_is_another() -> None:
    async def run() -> None:
        bad = failing(99, lambda s, r, b: web.Response(text="?"), name="bad")
        good = Server(name="good")
        async with pool_of(bad, good) as pool:
            for n in range(4):
                check_whole(await sampling(pool, request(n), attempts=2), request())
        assert 2 <= len(bad.bodies) <= 4

    asyncio.run(run())


def test_answers_are_let_go_of_at_once() -> None:
    """Some MB each: they would fill the memory before cycles are looked for."""

    async def run() -> list[Any]:
        async with pool_of(Server()) as pool:
            await sampling(pool, request())
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                for n in range(5):
                    await sampling(pool, request(n))
                gc.collect()
                return [o for o in gc.garbage if isinstance(o, Completion | Future | bytes)]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    assert asyncio.run(run()) == []


def test_a_hanging_server_costs_a_deadline() -> None:
    async def run() -> None:
        hanging, good = Server(script=Gate(), name="a"), Server(name="b")
        async with pool_of(hanging, good, timeout_s=0.2) as pool:
            start = time.monotonic()
            for sampled in await asyncio.gather(*(sampling(pool, request(n)) for n in range(4))):
                check_whole(sampled, request())
            assert time.monotonic() - start < 3
            assert pool.suspects[0] == (hanging.member, "no answer within 0.2 s")

    asyncio.run(run())
