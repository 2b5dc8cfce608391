"""F1: connections that break, hang or lie, at every place of an exchange. One attempt ends in
bounded time, says what happened, and has what may still be running aborted.
"""

import asyncio
import base64
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.client import Answer, Ask, Failure, Outcome, RolloutClient, new_rids
from megarl.types import RoutingShape, Sampling
from tests.helpers.pickled import dumped, trusted
from tests.rollout.scripted import Server, respond
from tests.rollout.test_client import good_reply

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
SAMPLING = Sampling(1.0, 3)


class Raw:
    """A server that speaks bytes: ``how`` ends a /generate whose request has been read whole."""

    def __init__(self, how: Callable[[Writer, Any], Awaitable[None]]) -> None:
        self._how = how
        self.aborted: list[str] = []
        self.asked: list[str] = []
        self.keys: set[str] = set()

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = {
                    k.lower(): v
                    for k, _, v in (line.partition(": ") for line in head.splitlines()[1:])
                }
                self.keys.add(fields.get("authorization", ""))
                body = json.loads(await reader.readexactly(int(fields["content-length"])))
                if "/abort_request" in head:
                    self.aborted.append(body["rid"])
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    continue
                self.asked += body["rid"]
                await self._how(writer, body)
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


def whole(body: Any) -> bytes:
    return json.dumps([good_reply(rid) for rid in body["rid"]]).encode()


def head_of(length: int, more: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n{more}\r\n".encode()


async def before_headers(writer: Writer, body: Any) -> None:
    writer.transport.abort()


async def orderly_before_headers(writer: Writer, body: Any) -> None:
    writer.close()


async def in_the_headers(writer: Writer, body: Any) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Le")
    await writer.drain()
    writer.close()


async def in_the_body(writer: Writer, body: Any) -> None:
    data = whole(body)
    writer.write(head_of(len(data)) + data[: len(data) // 2])
    await writer.drain()
    writer.close()


async def in_the_body_with_a_reset(writer: Writer, body: Any) -> None:
    data = whole(body)
    writer.write(head_of(len(data)) + data[:-1])
    await writer.drain()
    await asyncio.sleep(0.05)
    linger = b"\x01\0\0\0\0\0\0\0"  # on, 0 s: closing resets
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


async def in_a_chunk(writer: Writer, body: Any) -> None:
    data = whole(body)
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    writer.write(f"{len(data):x}\r\n".encode() + data[:20])
    await writer.drain()
    writer.close()


async def no_http(writer: Writer, body: Any) -> None:
    writer.write(b"\x16\x03\x01\x00\xa5 certainly no HTTP\r\n\r\n")
    await writer.drain()
    writer.close()


BROKEN = [
    before_headers,
    orderly_before_headers,
    in_the_headers,
    in_the_body,
    in_the_body_with_a_reset,
    in_a_chunk,
    no_http,
]


async def never(writer: Writer, body: Any) -> None:
    await asyncio.sleep(60)


async def after_the_headers_never(writer: Writer, body: Any) -> None:
    writer.write(head_of(1000))
    await asyncio.sleep(60)


async def drop_by_drop(writer: Writer, body: Any) -> None:
    writer.write(head_of(1000))
    while True:
        writer.write(b" ")
        await asyncio.sleep(0.05)


HANGING = [never, after_the_headers_never, drop_by_drop]


def asks(count: int = 3) -> list[Ask]:
    return [Ask(rid, [2, 3], 3, seed) for seed, rid in enumerate(new_rids(count))]


def outcome_of(raw: Raw, timeout_s: float = 5.0, routing: RoutingShape | None = None) -> Outcome:
    async def ask() -> Outcome:
        async with raw.running() as url:
            client = RolloutClient(url, "key", timeout_s)
            try:
                return await client.generate(asks(), SAMPLING, routing)
            finally:
                await client.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("how", BROKEN, ids=lambda how: how.__name__)
def test_a_break_is_a_failure_and_its_orphans_are_aborted(how: Any) -> None:
    raw = Raw(how)
    outcome = outcome_of(raw)
    assert isinstance(outcome, Failure) and outcome.taken
    assert outcome.reason.startswith("the connection broke (")
    assert len(raw.asked) == 3 and sorted(raw.aborted) == sorted(raw.asked)
    assert raw.keys == {"Bearer key"}


@pytest.mark.parametrize("how", HANGING, ids=lambda how: how.__name__)
def test_a_hang_ends_by_the_deadline_and_its_orphans_are_aborted(how: Any) -> None:
    raw = Raw(how)
    start = time.monotonic()
    outcome = outcome_of(raw, timeout_s=0.3)
    assert outcome == Failure("no answer within 0.3 s", taken=True)
    assert time.monotonic() - start < 2
    assert sorted(raw.aborted) == sorted(raw.asked) and len(raw.asked) == 3


@pytest.mark.parametrize(
    "said",
    [b'[{"output_ids": [4, 5, 1], "meta_', b"", b"[NaN]", b"\xff\xfe[]", b"[" * 100_000, b"null"],
    ids=lambda said: repr(said[:12]),
)
def test_a_200_with_half_a_json_or_none_is_garbage(said: bytes) -> None:
    async def answer(writer: Writer, body: Any) -> None:
        writer.write(head_of(len(said)) + said)

    outcome = outcome_of(Raw(answer))
    assert isinstance(outcome, Answer) and outcome.parts == (None,) * 3 and outcome.wrong


def test_aborts_have_a_deadline_of_their_own() -> None:
    """The server breaks the connection, and then listens to nobody."""

    class Deaf(Raw):
        async def __call__(self, reader: Reader, writer: Writer) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/abort_request" in head:
                self.aborted.append("heard")
                await asyncio.sleep(60)
            writer.transport.abort()

    start = time.monotonic()
    raw = Deaf(never)
    outcome = outcome_of(raw)
    assert isinstance(outcome, Failure) and raw.aborted == ["heard"] * 3
    assert time.monotonic() - start < 4


def test_who_gives_up_waiting_has_the_request_aborted() -> None:
    raw = Raw(never)

    async def ask() -> None:
        async with raw.running() as url:
            client = RolloutClient(url, "key", 60.0)
            task = asyncio.ensure_future(client.generate(asks(), SAMPLING))
            while not raw.asked:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.close()

    asyncio.run(ask())
    assert sorted(raw.aborted) == sorted(raw.asked) and len(raw.asked) == 3


def test_an_idle_connection_is_not_used_when_the_server_may_be_closing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvicorn closes one that is idle for 5 s; a request sent in that moment would be lost."""
    monkeypatch.setattr("megarl.rollout.client._KEEP_ALIVE_S", 0.2)
    connections = 0

    async def count(reader: Reader, writer: Writer) -> None:
        nonlocal connections
        connections += 1
        await raw_call(reader, writer)

    async def answer(writer: Writer, body: Any) -> None:
        data = whole(body)
        writer.write(head_of(len(data)) + data)

    raw = Raw(answer)
    raw_call = raw.__call__

    async def run() -> None:
        server = await asyncio.start_server(count, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = RolloutClient(url, "key", 5.0)
        for pause in (0.0, 0.0, 0.5):
            await asyncio.sleep(pause)
            assert isinstance(await client.generate(asks(), SAMPLING), Answer)
        await client.close()
        server.close()

    asyncio.run(run())
    assert connections == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_loopback_is_reached_past_any_proxy(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every proxy variable points to where nobody listens."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = Server()

    async def ask() -> Any:
        async with server.running(host):
            client = RolloutClient(server.url, "the-key", 5.0)
            outcome = await client.generate([Ask("r", [2, 3], 4, 9)], Sampling(1.0, 4))
            await client.abort(["r"])
            await client.close()
            return outcome

    outcome = asyncio.run(ask())
    assert isinstance(outcome, Answer) and outcome.parts[0] is not None
    assert outcome.parts[0].token_ids.tolist() == respond(2, 9, 4)[0]
    assert server.keys == {"Bearer the-key"} and server.aborted == ["r"]


def test_a_port_where_nobody_listens_was_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def ask() -> Outcome:
        client = RolloutClient(f"http://127.0.0.1:{port}", "key", 5.0)
        try:
            return await client.generate(asks(), SAMPLING)
        finally:
            await client.close()

    outcome = asyncio.run(ask())
    assert isinstance(outcome, Failure) and not outcome.taken


def test_k1_a_pickle_is_garbage_wherever_it_comes(tmp_path: Path) -> None:
    """As a whole answer, in a field, and as a table of routed experts: none is ever loaded."""
    marker = tmp_path / "marker"
    attack = dumped(partial(marker.touch))  # makes the marker where it is called
    attack = attack[:-1] + b")R."  # ... and is called when it is loaded
    trusted(attack)
    assert marker.exists()
    marker.unlink()
    text = base64.b64encode(attack).decode()

    def in_fields(body: Any) -> bytes:
        replies = [good_reply(rid) for rid in body["rid"]]
        replies[0]["meta_info"]["finish_reason"] = text
        replies[1]["output_ids"] = text
        replies[2]["meta_info"]["routed_experts"] = text
        return json.dumps(replies).encode()

    def as_version(body: Any) -> bytes:
        replies = [good_reply(rid) for rid in body["rid"]]
        replies[0]["meta_info"] |= {"weight_version": text, "weight_versions": None}
        return json.dumps(replies).encode()

    for said in (lambda body: attack, lambda body: text.encode(), in_fields, as_version):

        async def answer(writer: Writer, body: Any, said: Any = said) -> None:
            data = said(body)
            writer.write(head_of(len(data)) + data)

        outcome = outcome_of(Raw(answer), routing=RoutingShape((True,), 2, 8))
        if said is as_version:
            assert isinstance(outcome, Failure) and not outcome.taken
        else:
            assert isinstance(outcome, Answer) and outcome.parts == (None,) * 3
        assert not marker.exists()
