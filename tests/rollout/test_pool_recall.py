"""Requests are recalled, and evaluation goes on meanwhile; who waits, waits in bounds."""

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from megarl.errors import ServerError
from megarl.rollout.client import Ask
from megarl.rollout.pool import Wish, Withdrawn
from megarl.rollout.sampler import sample_group
from megarl.types import Sampling
from tests.rollout.scripted import Server
from tests.rollout.test_pool import Gate, sampling, until
from tests.rollout.test_sampler import check_whole, pool_of, request, rules


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.sampler._BACK_OFF_S", 0.005)
    monkeypatch.setattr("megarl.rollout.pool._PAUSE_S", 0.01)


def until_aborted(limit: int) -> Any:
    """Ends a request when all of it has been aborted, with so many tokens each."""

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        while not set(body["rid"]) <= set(server.aborted):
            await asyncio.sleep(0.005)
        return server.replies(body, limit)

    return script


@pytest.mark.parametrize("partial", ["continue", "restart", "discard"])
def test_a_recall_waits_for_what_there_is_and_then_nothing_is_asked(partial: Any) -> None:
    async def run() -> None:
        servers = [Server(script=until_aborted(4), name=n) for n in "ab"]
        async with pool_of(*servers) as pool:
            tasks = [sampling(pool, request(n), partial=partial) for n in range(6)]
            await until(lambda: sum(s.open for s in servers) == 6)
            later = sampling(pool, request(7), partial=partial)
            await asyncio.sleep(0)
            await pool.recall()
            assert [s.open for s in servers] == [0, 0]
            asked = sum(len(s.bodies) for s in servers)
            await asyncio.sleep(0.1)
            assert asked == sum(len(s.bodies) for s in servers)
            for server in servers:
                server.script = None
            pool.resume()
            for sampled in await asyncio.gather(*tasks):
                if partial == "discard":
                    assert sampled.discarded and sampled.completions == ()
                else:
                    check_whole(sampled, request())
            lengths = {len(ids) for s in servers for b in s.bodies for ids in b["input_ids"]}
            assert lengths == ({3, 7} if partial == "continue" else {3})
            result = await later
            if not result.discarded:  # else it was asked for before the recall
                check_whole(result, request())
            assert pool.suspects == []

    asyncio.run(run())


def test_what_takes_no_aborts_is_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.client.RolloutClient.can_abort", False)

    async def run() -> None:
        server = Server(script=Gate())
        async with pool_of(server) as pool:
            task = sampling(pool, request(), partial="continue", attempts=1)
            await until(lambda: server.open == 1)
            start = time.monotonic()
            await pool.recall()
            assert time.monotonic() - start < 5
            server.script = None
            pool.resume()
            check_whole(await task, request())
            assert pool.suspects == []

    asyncio.run(run())


def test_recalls_in_a_row_are_no_end_of_a_response_without_tokens() -> None:
    async def run() -> None:
        server = Server(script=until_aborted(0))
        async with pool_of(server) as pool:
            task = sampling(pool, request(), attempts=1)
            for _ in range(30):
                await until(lambda: server.open == 1)
                await pool.recall()
                pool.resume()
            server.script = None
            await until(lambda: server.open == 1 or task.done())
            server.aborted += [rid for body in server.bodies for rid in body["rid"]]
            check_whole(await task, request())

    asyncio.run(run())


class Deaf(Server):
    """Hears no abort, as one whose process stands still."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/abort_request":
            await asyncio.sleep(60)
        return await super().handle(request)


def test_a_recall_ends_where_aborts_are_heard_and_have_no_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang, of a request that came during a pause. The server is as good as before."""
    monkeypatch.setattr("megarl.rollout.pool._ABORT_EVERY_S", 0.02)

    async def run() -> None:
        server = Server(script=Gate())
        async with pool_of(server, timeout_s=60.0) as pool:
            task = sampling(pool, request(), attempts=1)
            await until(lambda: server.open == 1)
            start = time.monotonic()
            await pool.recall()
            assert time.monotonic() - start < 5
            assert pool.suspects == []
            heard = {rid: server.aborted.count(rid) for rid in server.bodies[0]["rid"]}
            assert set(heard.values()) == {10 + 1}  # and once it is given up
            server.script = None
            pool.resume()
            check_whole(await task, request())

    asyncio.run(run())


def test_a_recall_waits_as_long_as_a_server_ends_one_request_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large answers take their time; what comes last is not given up."""
    monkeypatch.setattr("megarl.rollout.pool._ABORT_EVERY_S", 0.02)
    monkeypatch.setattr("megarl.rollout.pool._ABORTS_HEARD", 20)
    turn = asyncio.Lock()

    async def script(server: Server, request: web.Request, body: Any) -> Any:
        while not set(body["rid"]) <= set(server.aborted):
            await asyncio.sleep(0.005)
        async with turn:
            await asyncio.sleep(0.15)
            return server.replies(body, 4)

    async def run() -> None:
        server = Server(script=script)
        async with pool_of(server, timeout_s=60.0) as pool:
            tasks = [sampling(pool, request(n), attempts=1) for n in range(8)]
            await until(lambda: server.open == 8)
            await pool.recall()
            server.script = None
            pool.resume()
            for task in tasks:
                check_whole(await task, request())
            assert {len(ids) for body in server.bodies[8:] for ids in body["input_ids"]} == {7}

    asyncio.run(run())


def test_a_recall_ends_at_a_server_that_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.pool._RECALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr("megarl.rollout.client._ABORT_TIMEOUT_S", 0.1)

    async def run() -> None:
        server = Deaf(script=Gate())
        async with pool_of(server, timeout_s=60.0) as pool:
            task = sampling(pool, request(), attempts=1)
            await until(lambda: server.open == 1)
            start = time.monotonic()
            await pool.recall()
            assert time.monotonic() - start < 3
            assert pool.suspects == [(server.member, "no answer 0.3 s after an abort")]
            server.script = None
            pool.resume()
            check_whole(await task, request())

    asyncio.run(run())


def test_evaluation_goes_on_during_a_recall_and_before_others() -> None:
    async def run() -> None:
        server = Server()
        async with pool_of(server) as pool:
            await pool.recall()
            waiting = sampling(pool, request(0))
            urgent = sample_group(request(9), pool, rules(), patience_s=5.0)
            check_whole(await urgent, request())
            assert not waiting.done()
            pool.resume()
            check_whole(await waiting, request())

    asyncio.run(run())


def test_patience_ends_where_there_is_no_server_but_not_where_all_are_busy() -> None:
    async def run() -> None:
        async with pool_of() as pool:
            found = await sample_group(request(), pool, rules(), patience_s=0.1)
            assert found.failed == "no rollout server answered for 0.1 s"
        server = Server(script=Gate())
        async with pool_of(server, max_in_flight=4) as pool:
            tasks = [
                asyncio.ensure_future(sample_group(request(n), pool, rules(), patience_s=0.05))
                for n in range(3)
            ]
            await asyncio.sleep(0.3)
            server.script.opened.set()  # type: ignore[union-attr]
            for sampled in await asyncio.gather(*tasks):
                check_whole(sampled, request())

    asyncio.run(run())


def test_who_stops_waiting_leaves_nothing_behind() -> None:
    async def run() -> None:
        server = Server()
        async with pool_of(server, max_in_flight=4) as pool:
            async with pool.lease(Wish(0, 4, 10)):
                waiting = asyncio.ensure_future(sample_group(request(1), pool, rules()))
                await asyncio.sleep(0.02)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                with pytest.raises(ServerError, match="no rollout server"):
                    pool.serve_from([])
                    async with pool.lease(Wish(2, 4, 10), patience_s=0.02):
                        pass
            pool.serve_from([server.member])
            check_whole(await sampling(pool, request(3)), request())
            assert [s.in_flight for s in pool._servers.values()] == [0]

    asyncio.run(run())


@pytest.mark.parametrize("taken_back", ["recall", "serve_from"])
def test_a_lease_that_is_taken_back_before_it_is_used_asks_nobody(taken_back: str) -> None:
    async def run() -> None:
        server = Server()
        async with pool_of(server) as pool:
            async with pool.lease(Wish(0, 1, 10)) as lease:
                if taken_back == "recall":
                    await pool.recall()
                else:
                    pool.serve_from([])
                ask = Ask("r", [2, 3], 4, 1)
                assert isinstance(await lease.ask([ask], Sampling(1.0, 4), None), Withdrawn)
            assert server.bodies == []

    asyncio.run(run())


def test_what_is_urgent_is_not_recalled() -> None:
    async def run() -> None:
        server = Server(script=Gate())
        async with pool_of(server) as pool:
            urgent = asyncio.ensure_future(sample_group(request(0), pool, rules(), patience_s=5.0))
            await until(lambda: server.open == 1)
            await pool.recall()
            assert server.open == 1 and server.aborted == []
            server.script.opened.set()  # type: ignore[union-attr]
            check_whole(await urgent, request())
            pool.resume()

    asyncio.run(run())
