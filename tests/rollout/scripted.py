"""Servers of the tests' own that sample by a formula, so that every token is known beforehand.

The token at an absolute position of a sequence is a hash of its seed and that position, the end
token among them. So a response is the same however often it was interrupted, and wherever it was
sampled: ``respond`` is what must come out. A token's log-prob is also of the weights that sampled
it, and its experts are of the weights that it was first fed to.
"""

import asyncio
import base64
import contextlib
import hashlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from megarl.types import Member, RoutingShape

EOS, VOCAB = 1, 24
SHAPE = RoutingShape((False, True, True), topk=2, experts=300)


def token_at(seed: int, position: int) -> int:
    word = hashlib.sha256(f"{seed},{position}".encode()).digest()
    return EOS if word[0] < 20 else 2 + word[1] % (VOCAB - 2)


def logprob_of(token: int, version: int = 0) -> float:
    return -(token + 1) / 8 - version / 128  # exact in fp32


def experts_of(token: int, position: int, version: int = 0) -> list[list[int]]:
    """[MoE layers, top-k]; versions up to 10 differ."""
    first, second = token + 3 * (version % 11), (token + position) % 200 + 70
    return [[first + 13 * layer, second] for layer in range(2)]


def routing_of(tokens: Sequence[int], versions: Sequence[int] = ()) -> np.ndarray:
    """u16 [L - 1, MoE layers, top-k], of a whole sequence; ``versions`` of its rows, default 0."""
    given = versions or [0] * (len(tokens) - 1)
    rows = [
        experts_of(token, position, version)
        for position, (token, version) in enumerate(zip(tokens[:-1], given, strict=True))
    ]
    return np.array(rows, np.uint16).reshape(len(rows), 2, 2)


def versions_of_rows(prompt_length: int, versions: Sequence[int]) -> list[int]:
    """[L - 1] of a sequence, from those of its sampled tokens, of which there is one at least: a
    token is fed to sample the next one, the prompt to sample the first.
    """
    return [versions[0]] * prompt_length + list(versions[1:])


def respond(prompt_length: int, seed: int, budget: int) -> tuple[list[int], str]:
    """The whole response, and how it ends."""
    tokens: list[int] = []
    while len(tokens) < budget:
        tokens.append(token_at(seed, prompt_length + len(tokens)))
        if tokens[-1] == EOS:
            return tokens, "stop"
    return tokens, "length"


@dataclass
class Server:
    """``script(server, request, body)`` answers a /generate, or returns None for the usual answer.
    ``limit``: responses are aborted after so many tokens. ``moves``: the version that samples from
    such a token of a reply on.
    """

    script: Callable[["Server", web.Request, Any], Awaitable[Any]] | None = None
    name: str = "server 0"
    version: int = 0
    url: str = ""
    limit: int | None = None
    moves: dict[int, int] = field(default_factory=dict)
    says: str | None = None  # instead of its version
    bodies: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    open: int = 0  # requests in flight
    most_open: int = 0
    most_sequences: int = 0
    sequences: int = 0

    @property
    def member(self) -> Member:
        return Member(self.name, self.url, f"boot of {self.name}")

    def replies(self, body: Any, limit: int | None = None) -> list[dict[str, Any]]:
        start = body.get("routed_experts_start_len", 0)
        wanted = body.get("return_routed_experts", False)
        return [
            self.reply(rid, ids, params, limit, start if wanted else None)
            for rid, ids, params in zip(
                body["rid"], body["input_ids"], body["sampling_params"], strict=True
            )
        ]

    def reply(
        self, rid: str, ids: list[int], params: Any, limit: int | None, start: int | None
    ) -> dict[str, Any]:
        tokens, finish = respond(len(ids), params["sampling_seed"], params["max_new_tokens"])
        if limit is not None and limit < len(tokens) + (finish == "length"):
            tokens, finish = tokens[:limit], "abort"
        versions = [self.version] * len(tokens)
        for begin, version in self.moves.items():
            versions[begin:] = [version] * len(versions[begin:])
        sampled = zip(tokens, versions, strict=True)
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": {"type": finish},
            "weight_version": self.says or str([self.version, *versions][-1]),
            "output_token_logprobs": [[logprob_of(t, v), t, None] for t, v in sampled],
        }
        if self.moves:
            meta["weight_versions"] = [
                {"version": str(v), "start": i, "end": i + 1} for i, v in enumerate(versions)
            ]
        if start is not None:
            of_rows = versions_of_rows(len(ids), versions or [self.version])
            whole = zip([*ids, *tokens][:-1], of_rows, strict=bool(tokens))
            rows = [experts_of(t, p, v) for p, (t, v) in enumerate(whole)][start:]
            every = [[[0, 0], *row] for row in rows]  # the first layer is dense
            meta["routed_experts"] = base64.b64encode(np.array(every, "<i4").tobytes()).decode()
        return {"output_ids": tokens, "meta_info": meta}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.keys.add(request.headers.get("Authorization"))
        body = await request.json()
        if request.path == "/abort_request":
            self.aborted.append(body["rid"])
            return web.Response()
        self.bodies.append(body)
        self.open += 1
        self.sequences += len(body["rid"])
        self.most_open = max(self.most_open, self.open)
        self.most_sequences = max(self.most_sequences, self.sequences)
        try:
            answer = await self.script(self, request, body) if self.script else None
        finally:
            self.open -= 1
            self.sequences -= len(body["rid"])
        if answer is None:
            answer = self.replies(body, self.limit)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    @contextlib.asynccontextmanager
    async def running(self, host: str = "127.0.0.1") -> Any:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, host, 0).start()
        port = runner.addresses[0][1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()


@contextlib.contextmanager
def in_thread(*servers: Server) -> Iterator[None]:
    """The servers answer from a loop in a thread, for as long as the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stack = contextlib.AsyncExitStack()

    async def start() -> None:
        for server in servers:
            await stack.enter_async_context(server.running())

    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
