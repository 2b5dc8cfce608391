"""Rates that ``scale_pushes.py`` reckons with: assumed of hardware, or measured on a core of this
machine, where a push costs its processes something beside moving bytes.

    .venv/bin/python tools/scale_push_rates.py          # measures them again

Times are those that a core worked, best of a few, since it is the process that is waited for.
What a device does is not in them: tensors are tiny. SGLang's own (``load_s``) is not measured here;
docs/scale.md says how it was.
"""

import json
import multiprocessing
import socket
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
from aiohttp import web

from megarl.ops.digest import digest_partial, finish
from megarl.protocols import Bucket
from megarl.rollout.control import ServerControl
from megarl.sync.asking import ask
from megarl.sync.packing import Packer
from megarl.sync.stream import pieces


def _rate(known: str, value: float, what: str) -> float:
    found: float = field(default=value, metadata={"known": known, "what": what})
    return found


@dataclass(frozen=True)
class Rates:
    """Bytes a second; seconds of one where the name ends in ``_s``."""

    nic: float = _rate("assumed", 40e9, "a GPU's card: 400 Gb/s, of which a broadcast gets 80 %")
    cards: float = _rate("assumed", 1, "cards that one sender's broadcast goes out by")
    nvlink: float = _rate("assumed", 200e9, "of one GPU, as `megarl plan` has it, and so for nic")
    memory: float = _rate("assumed", 2e12, "of a GPU, read or written")
    digest: float = _rate("assumed", 1e12, "`digest_partial` on a GPU")
    quantise: float = _rate("assumed", 1e12, "`fp8_block_quant` on a GPU, of bf16")
    gather_s: float = _rate("assumed", 50e-6, "to start one gather")
    hop_s: float = _rate("assumed", 10e-6, "each rank of a group delays a bucket by as much")
    call_s: float = _rate("assumed", 5e-3, "a server's own for a call, its process apart")
    pcie: float = _rate("assumed", 40e9, "between a GPU and host memory, either way")
    encode: float = _rate("assumed", 24e9, "`delta_encode_` on eight cores of 3 GB/s, measured")
    apply: float = _rate("assumed", 40e9, "`delta_apply_` on eight cores of 5 GB/s, measured")
    request_s: float = _rate("measured", 1e-3, "sender's process: a request, of 64 at once")
    pack_s: float = _rate("measured", 32e-6, "sender's process: a tensor, its digest included")
    load_s: float = _rate("measured", 54e-6, "SGLang's process: loading a tensor of an expert")
    server_digest: float = _rate("assumed", 1e12, "as digest, on servers")
    server_digest_s: float = _rate(
        "measured", 12e-6, "SGLang's process: a tensor's digest, by megarl's operator"
    )
    json: float = _rate("measured", 220e6, "rank 0: digests read and compared")


def measure(tensors: int = 20_000, servers: int = 64, tries: int = 3) -> dict[str, float]:
    """``tensors`` of a push; ``servers`` that are asked at once."""
    name = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
    names = [name.format(i // 384, i % 384) for i in range(tensors)]
    small = torch.zeros(16, 16, dtype=torch.bfloat16)
    groups: list[Bucket] = [[(name, small)] for name in names]
    packer = Packer(64 << 20, torch.device("cpu"))

    def packed() -> None:
        for _ in packer.pack(pieces(groups)):
            pass

    def digested() -> None:
        for _ in range(1000):
            finish(digest_partial(small), small.dtype, small.shape)

    reply = json.dumps({"ranks": [{"checksums": dict.fromkeys(names, "0" * 16)}] * 8})
    return {
        "request_s": _request_s(servers, tries),
        "pack_s": _best(packed, tries) / tensors,
        "server_digest_s": _best(digested, tries) / 1000,
        "json": len(reply) / _best(lambda: _compared(reply), tries),
    }


def _compared(reply: str) -> None:
    first, *others = [rank["checksums"] for rank in json.loads(reply)["ranks"]]
    assert all(other == first for other in others)


def _request_s(servers: int, tries: int) -> float:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(there,), daemon=True)
    child.start()
    url = f"http://127.0.0.1:{here.recv()}"
    shapes = [[1536, 4096]] * 20
    message = {
        "names": ["model.layers.3.weight"] * 20,
        "dtypes": ["bfloat16"] * 20,
        "shapes": shapes,
    }
    sinks = [ServerControl(url, "key", name=f"server-{k}") for k in range(servers)]

    def asked() -> None:
        replies = [ask(sink, "receive", message, 60.0) for sink in sinks]
        wait(replies)
        for reply in replies:
            reply.result()

    try:
        asked()  # whatever is done once
        return _best(asked, tries) / servers
    finally:
        child.terminate()
        child.join()


def _answer(found: Connection) -> None:
    """A server that agrees to everything; tells its port."""

    async def agree(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"success": True})

    listening = socket.create_server(("127.0.0.1", 0))
    found.send(listening.getsockname()[1])
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", agree)
    web.run_app(app, sock=listening, print=None)


def _best(do: Callable[[], object], tries: int) -> float:
    def seconds() -> float:
        start = time.process_time()
        do()
        return time.process_time() - start

    return min(seconds() for _ in range(tries))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
