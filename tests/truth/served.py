"""Servers that are asked as a trainer asks them, and what they say as samples."""

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.models.spec import read_spec
from megarl.rollout.client import Answer, Ask, RolloutClient, new_rids
from megarl.rollout.embedded import Engine
from megarl.rollout.embedded_model import SlotModel
from megarl.rollout.server import build_app, run_app
from megarl.sync.receiver import ModelReceiver
from megarl.types import Completion, RoutingShape, Sample, Sampling

CONTEXT = 64
PROMPTS = [(5,), (3, 9, 14, 2), (7, 7, 20, 11, 2, 19, 4, 8, 23, 6, 12, 3, 2), (18, 4, 13)]


class Address(NamedTuple):
    url: str
    key: str


class Question(NamedTuple):
    """Of an actor with the weights of ``folder``."""

    folder: Path
    samples: list[Sample]
    dtype: str
    temperature: float
    replay: bool  # of the server's routing


def routing_of(folder: Path) -> RoutingShape | None:
    """What the trainer asks for with R3, of a model that has experts."""
    spec = read_spec(folder)
    if not any(spec.moe_layers):
        return None
    return RoutingShape(spec.moe_layers, spec.topk, spec.experts)


@contextlib.contextmanager
def embedded(folder: Path, dtype: str = "fp32") -> Iterator[Address]:
    """The embedded server, behind its HTTP face, in a thread of this process."""
    model = SlotModel(folder, num_slots=16, context_length=CONTEXT, dtype=dtype, fixed_shape=True)
    engine = Engine(model, ModelReceiver(model.weights))
    engine.start()
    key = secrets.token_hex(8)
    listener = socket.create_server(("127.0.0.1", 0))
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    app = build_app(engine, key)
    serving = run_app(app, listener, started.set, stop, lambda: engine.stop())
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield Address(f"http://127.0.0.1:{listener.getsockname()[1]}", key)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def completions(
    server: Address,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    routing: RoutingShape | None = None,
    seed: int = 0,
) -> list[Completion]:
    """One for every prompt, of one request of the client's."""

    async def ask() -> object:
        client = RolloutClient(server.url, server.key, timeout_s=300.0)
        asks = [
            Ask(rid, tokens, sampling.max_new_tokens, seed + i)
            for i, (rid, tokens) in enumerate(zip(new_rids(len(prompts)), prompts, strict=True))
        ]
        try:
            return await client.generate(asks, sampling, routing)
        finally:
            await client.close()

    answer = asyncio.run(ask())
    assert isinstance(answer, Answer) and not answer.wrong, answer
    return [part for part in answer.parts if part is not None]


def samples(
    server: Address,
    folder: Path,
    *,
    temperature: float,
    new_tokens: int = 24,
    per_prompt: int = 3,
) -> list[Sample]:
    """Of every prompt, with what the server says of tokens and experts."""
    prompts = [list(p) for p in PROMPTS for _ in range(per_prompt)]
    sampling = Sampling(temperature, new_tokens, ignore_eos=True)
    parts = completions(server, prompts, sampling, routing_of(folder))
    found = []
    for i, (prompt, part) in enumerate(zip(prompts, parts, strict=True)):
        before = len(prompt)
        length = before + len(part.token_ids)
        found.append(
            Sample(
                prompt_id=f"p{i // per_prompt}",
                group=i // per_prompt,
                index=i % per_prompt,
                tokens=np.concatenate([np.array(prompt, np.int32), part.token_ids]),
                mask=np.arange(length) >= before,
                rollout_logprobs=np.concatenate([np.zeros(before, np.float32), part.logprobs]),
                rewards=np.zeros(1, np.float32),
                correct=False,
                truncated=True,
                routing=part.routing,
            )
        )
    return found
