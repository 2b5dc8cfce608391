"""A collector and the embedded server: samples are what the model samples, however often
connections break on the way.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megarl.rollout.collector import Collector
from megarl.rollout.seeds import sample_seeds
from megarl.types import GroupRequest, Mean, Member, Prompt, RoutingShape, Sampling, VersionSpan
from tests.rollout.collecting import settings_in, taken, write_folder
from tests.rollout.conftest import EOS, EXPERTS, LAYERS, TOP_K, VOCAB, Reference, Server

PROMPTS = [Prompt(f"p{i}", (3 + i, 5, 7)[: 1 + i % 3], {"answer": i % 2}) for i in range(12)]
NEW = 8
SHAPE = RoutingShape((True,) * LAYERS, TOP_K, EXPERTS)


@pytest.fixture(scope="module")
def shared(session_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    folder = write_folder(tmp_path_factory.mktemp("collector"), VOCAB, EOS, key=session_server.key)
    made = Collector(settings_in(folder, partial="restart", routing=SHAPE, max_attempts=50))
    yield made
    made.close()


@pytest.fixture
def collector(shared: Collector, server: Server) -> Iterator[Collector]:
    shared.serve_from([Member("server 0", server.url, "1")])
    yield shared
    shared.serve_from([])
    shared.suspects()


def requests(first: int = 0, step: int = 3) -> list[GroupRequest]:
    seeds = sample_seeds(5, step, PROMPTS, 4)
    return [
        GroupRequest(first + i, step, prompt, tuple(own), Sampling(1.0, NEW))
        for i, (prompt, own) in enumerate(zip(PROMPTS, seeds, strict=True))
    ]


def draw(collector: Collector, asked: list[GroupRequest]) -> dict[tuple[str, int], Any]:
    """Samples by prompt and index."""
    collector.issue(asked)
    outcomes = taken(collector, len(asked))
    assert not any(o.failed for o in outcomes.values()), outcomes
    return {(s.prompt_id, s.index): s for o in outcomes.values() for s in o.samples}


def bits(samples: dict[tuple[str, int], Any]) -> dict[tuple[str, int], tuple[bytes, ...]]:
    return {
        name: (s.tokens.tobytes(), s.rollout_logprobs.tobytes(), s.routing.tobytes())
        for name, s in samples.items()
    }


def test_samples_are_what_the_model_samples(collector: Collector, reference_a: Reference) -> None:
    samples = draw(collector, requests())
    assert len(samples) == 48
    for s in samples.values():
        prompt = PROMPTS[s.group]
        asked = len(prompt.token_ids)
        tokens = s.tokens.tolist()
        assert tuple(tokens[:asked]) == prompt.token_ids and s.prompt_id == prompt.id
        expected = reference_a.logprobs(tokens).numpy()[asked - 1 :]
        np.testing.assert_allclose(s.rollout_logprobs[asked:], expected, atol=1e-5, rtol=0)
        assert s.truncated == (tokens[-1] != EOS)
        right = not s.truncated and (len(tokens) - asked - 1) % 2 == prompt.payload["answer"]
        assert (s.reward, s.correct) == (float(right), right)
        assert s.version_spans == (VersionSpan(0, 0, len(tokens) - asked, "server 0"),)
        experts = np.sort(reference_a.routing(tokens)[:-1].numpy(), -1)
        np.testing.assert_array_equal(np.sort(s.routing, -1), experts)
        assert s.routing.dtype == np.uint8
    assert {s.truncated for s in samples.values()} == {True, False}


def test_evaluation_is_greedy(collector: Collector, reference_a: Reference) -> None:
    metrics = collector.evaluate(PROMPTS, Sampling(0.0, 10), area="eval")
    answers = [reference_a.greedy(list(p.token_ids), 10) for p in PROMPTS]
    right = sum(
        a[-1] == EOS and (len(a) - 1) % 2 == p.payload["answer"]
        for a, p in zip(answers, PROMPTS, strict=True)
    )
    values = {m.name: m.value for m in metrics}
    assert values["eval/accuracy"] == Mean(right, 12)
    assert values["eval/response_length"] == Mean(sum(map(len, answers)), 12)


class Breaking:
    """Passes connections on to a server; every second one that carries a request breaks, in turn
    before anything of the answer, in its headers, and in its body.
    """

    def __init__(self, url: str) -> None:
        self.host, port = url.removeprefix("http://").split(":")
        self.port, self.generated, self.broken = int(port), 0, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self.host, self.port)
        left: list[int] = []  # bytes of the answer that come through

        async def ask() -> None:
            while data := await reader.read(65536):
                if b"POST /generate " in data:
                    self.generated += 1
                    if self.generated % 2:
                        left.append((0, 20, 400)[self.broken % 3])
                        self.broken += 1
                back.write(data)

        async def answer() -> None:
            while data := await there.read(65536):
                if left:
                    writer.write(data[: left[0]])
                    await writer.drain()
                    break
                writer.write(data)
            writer.transport.abort()

        with contextlib.suppress(ConnectionError):
            await asyncio.gather(ask(), answer())
        back.close()


@contextlib.contextmanager
def behind(proxy: Breaking) -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    start = asyncio.start_server(proxy, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_samples_do_not_depend_on_retries_nor_on_the_server(
    collector: Collector, server: Server
) -> None:
    """Bit for bit, with two servers of which every second connection breaks."""
    once = bits(draw(collector, requests()))
    assert bits(draw(collector, requests(step=4))) != once
    proxies = [Breaking(server.url), Breaking(server.url)]
    with behind(proxies[0]) as first, behind(proxies[1]) as second:
        collector.serve_from([Member("server 1", first, "1"), Member("server 2", second, "1")])
        collector.issue(requests(first=100))
        outcomes = taken(collector, len(PROMPTS), 120.0)
    again = {(s.prompt_id, s.index): s for o in outcomes.values() for s in o.samples}
    assert bits(again) == once
    assert sum(proxy.broken for proxy in proxies) >= 6
    assert sum(o.attempts - 1 for o in outcomes.values()) == sum(p.broken for p in proxies)
    assert {s.version_spans[0].server for s in again.values()} == {"server 1", "server 2"}


def test_restarted_samples_are_bit_for_bit_those_that_were_not_interrupted(
    collector: Collector, server: Server
) -> None:
    """A recall in the middle of it all."""
    once = bits(draw(collector, requests()))
    collector.issue(requests(first=200))
    collector.recall()
    state = server.get("/server_info")
    assert (state["running"], state["waiting"]) == (0, 0)
    collector.resume()
    outcomes = taken(collector, len(PROMPTS))
    again = {(s.prompt_id, s.index): s for o in outcomes.values() for s in o.samples}
    assert bits(again) == once
