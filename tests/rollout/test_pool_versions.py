"""A server's address is not the server: another process that answers there has other weights, and
what these sample is not taken.
"""

import asyncio
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.client import RolloutClient
from megarl.rollout.collector_process import Work
from megarl.rollout.fleet import start_fleet
from megarl.rollout.messages import request_to_json
from megarl.rollout.pool import Pool
from megarl.rollout.sampler import Rules, sample_group
from megarl.rollout.starter import free_port
from megarl.rundir import RunDir
from megarl.types import GroupRequest, Member, Prompt, Sampling
from tests.rollout.collecting import request as collected
from tests.rollout.collecting import settings_in, write_folder
from tests.rollout.conftest import Server as RealServer
from tests.rollout.conftest import server_section
from tests.rollout.rewards import even_length, grading
from tests.rollout.scripted import EOS, VOCAB, Server
from tests.rollout.test_pool import Gate, sampling, until
from tests.rollout.test_sampler import check_whole, interrupting, pool_of, request, rules


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.sampler._BACK_OFF_S", 0.005)
    monkeypatch.setattr("megarl.rollout.pool._PAUSE_S", 0.01)


def versions_of(found: Any) -> set[int]:
    return {span.version for c in found.completions for span in c.version_spans}


async def asked_again(server: Server) -> None:
    count = len(server.bodies)
    await until(lambda: len(server.bodies) > count + 2)


@pytest.mark.parametrize("stale", ["0", "6", "default"])
def test_a_process_without_the_weights_gives_nothing_until_it_has_them(stale: str) -> None:
    """It listens where the one before did; nobody has told the collector."""

    async def run() -> None:
        server = Server(version=7)
        async with pool_of(server) as pool:
            pool.serve_from([server.member], 7)
            assert versions_of(await sampling(pool, request(0), attempts=1)) == {7}
            server.says = stale
            waiting = sampling(pool, request(1), attempts=1)
            await asked_again(server)
            assert not waiting.done()
            reasons = {reason for _, reason in pool.suspects}
            expected = "expected: 7 or above, as a weight push sets it"
            assert reasons == {f"found weight version {stale!r}; {expected}"}
            server.version, server.says = 8, None  # a push has reached it, and told of nobody yet
            found = await waiting
            assert versions_of(found) == {8} and found.attempts == 1

    asyncio.run(run())


def test_others_take_over_from_a_process_without_the_weights() -> None:
    async def run() -> None:
        stale, good = Server(version=3, name="a"), Server(version=4, name="b")
        async with pool_of(stale, good) as pool:
            pool.serve_from([stale.member, good.member], 4)
            found = [await sampling(pool, request(n), attempts=1) for n in range(6)]
            assert {(f.failed, f.attempts) for f in found} == {("", 1)}
            assert set.union(*map(versions_of, found)) == {4}
            assert {member for member, _ in pool.suspects} == {stale.member}
            assert 1 <= len(stale.bodies) < 6

    asyncio.run(run())


def test_what_was_sampled_before_a_process_took_a_servers_place_is_kept() -> None:
    async def run() -> None:
        server = interrupting(4)
        inner, server.version = server.script, 7
        assert inner is not None

        async def script(of: Server, request: Any, body: Any) -> Any:
            answer = await inner(of, request, body)
            of.version = (7, 0, 0, 7)[min(len(of.bodies), 3)]
            return answer

        server.script = script
        async with pool_of(server) as pool:
            pool.serve_from([server.member], 7)
            found = await sampling(pool, request(), attempts=1)
            check_whole(found, request(), version=7)
            assert found.attempts == 1
            lengths = [len(body["input_ids"][-1]) for body in server.bodies]
            assert lengths == [3, 7, 7, 7]

    asyncio.run(run())


def test_what_was_asked_for_before_a_push_may_be_of_the_weights_before_it() -> None:
    async def run() -> None:
        server = Server(script=Gate(), version=6)
        async with pool_of(server) as pool:
            pool.serve_from([server.member], 6)
            before = sampling(pool, request(0), attempts=1)
            await until(lambda: server.open == 1)
            pool.serve_from([server.member], 7)
            server.script.opened.set()  # type: ignore[union-attr]
            assert versions_of(await before) == {6} and pool.suspects == []
            after = sampling(pool, request(1), attempts=1)
            await asked_again(server)
            server.version = 7
            assert versions_of(await after) == {7}

    asyncio.run(run())


def test_a_process_that_never_gets_the_weights_costs_bounded_time() -> None:
    async def run() -> None:
        server = Server(version=1)
        async with pool_of(server) as pool:
            pool.serve_from([server.member], 2)
            by = replace(rules(), patience_s=0.2)
            found = await asyncio.wait_for(sample_group(request(), pool, by), 20)
            assert found.completions == () and "found weight version '1'" in found.failed

    asyncio.run(run())


def test_a_collector_is_told_which_version_servers_have(tmp_path: Path) -> None:
    said: list[Any] = []

    async def run() -> None:
        server = Server(version=4)
        settings = settings_in(write_folder(tmp_path, VOCAB, EOS))
        work = Work(settings, lambda m, _=(): said.append(m), grading(even_length))
        async with server.running():
            members = [asdict(server.member)]
            work.handle({"do": "serve_from", "members": members, "version": 5})
            work.handle({"do": "issue", "requests": [request_to_json(collected(0))]})
            await until(lambda: any("suspect" in message for message in said))
            server.version = 5
            await until(lambda: any("outcome" in message for message in said))
            await work.close()

    asyncio.run(run())
    assert "found weight version '4'; expected: 5 or above" in said[0]["reason"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_is_restarted_at_its_address_while_a_collector_has_it(
    model_a: Path, tmp_path: Path
) -> None:
    """The embedded server. It starts as version 0; what the trainer has pushed is 7."""
    fleet = start_fleet(
        server_section(port=free_port("127.0.0.1"), start_timeout_s=120.0),
        run_dir=RunDir(tmp_path / "run"),
        model=model_a,
        dtype="fp32",
        on_death=lambda death: None,
        on_failure="restart",
        max_restarts=1,
    )
    server = RealServer(fleet.urls[0], fleet.key, model_a)
    suspects: list[str] = []

    def has_the_weights() -> None:
        body = {"new_version": "7", "abort_all_requests": False}
        server.post("/update_weight_version", body)

    def connect(member: Member) -> RolloutClient:
        return RolloutClient(member.url, fleet.key, 30.0)

    def asked(serial: int) -> GroupRequest:
        return GroupRequest(serial, 1, Prompt("p", (3, 9), {}), (1, 2), Sampling(1.0, 6))

    async def run() -> None:
        pool = Pool(connect, lambda m, reason: suspects.append(reason))
        pool.serve_from(fleet.members(), 7)
        by = Rules("continue", 1)
        before = await sample_group(asked(0), pool, by)
        process = fleet.managed[0].process
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10.0)
        waiting = asyncio.ensure_future(sample_group(asked(1), pool, by))
        await until(lambda: any("found weight version '0'" in why for why in suspects), 120.0)
        assert not waiting.done()
        await asyncio.to_thread(has_the_weights)
        after = await waiting
        await pool.close()
        for found in (before, after):
            assert (found.failed, found.attempts, versions_of(found)) == ("", 1, {7})

    try:
        has_the_weights()
        asyncio.run(run())
        assert any(why.startswith("no connection") for why in suspects)
    finally:
        fleet.close()
