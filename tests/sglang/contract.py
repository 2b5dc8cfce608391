"""Requests and readings that the tests of the protocol share, whichever server they ask."""

import base64
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.rollout.control import ServerControl
from tests.sglang.conftest import Models
from tests.sglang.protocol import PROMPT, digests, joined_group, ok, send
from tests.sglang.server import Endpoint

LAYERS, TOP_K, EOS = 4, 2, 1
TOLERANCE = 5e-5  # fp32 on both sides, sums in another order over up to 400 tokens
Reference = Callable[[Path, list[int]], dict[str, Any]]


def body(prompt: list[int] = PROMPT, new: int = 8, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True}
    sampling |= fields.pop("sampling", {})
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **fields}


def generate(server: Endpoint, *args: Any, **fields: Any) -> Any:
    return ok(server, "/generate", **body(*args, **fields))


LONG = 300  # tokens of a response in whose middle something happens


def running(
    server: Endpoint, pool: ThreadPoolExecutor, new: int = LONG, **fields: Any
) -> "Future[Any]":
    """A long response of which some tokens have been sampled."""
    future = pool.submit(generate, server, PROMPT, new, **fields)
    deadline = time.monotonic() + 30
    while server.post("/flush_cache")[0] == 200:  # refused as soon as something runs
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert not future.done()
    return future


def logprobs_of(reply: Any) -> list[float]:
    triples = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == reply["output_ids"]
    return [value for value, _, _ in triples]


def spans_of(reply: Any) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in reply["meta_info"]["weight_versions"]]


def routing_of(reply: Any) -> np.ndarray:
    raw = base64.b64decode(reply["meta_info"]["routed_experts"])
    return np.frombuffer(raw, np.int32).reshape(-1, LAYERS, TOP_K)


def experts_of(rows: np.ndarray, expected: list[Any] | np.ndarray) -> bool:
    """Whether [tokens, layers, K] are the experts expected, but for a few near-ties; otherwise they
    are clearly others.
    """
    same = (np.sort(rows, -1) == np.sort(expected, -1)).all(-1).mean()
    assert same > 0.99 or same < 0.9, same
    return bool(same > 0.99)


def ok_within(server: Endpoint, path: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.post(path)[0] == 200:
            return True
        time.sleep(0.1)
    return False


def pushed(server: Endpoint, background: ThreadPoolExecutor, model: Path, mode: str) -> None:
    """Its weights, as version 12."""
    weights = load_file(model / "model.safetensors")
    control = ServerControl(server.url, server.key)
    with joined_group(server, background, num_server_ranks=1) as group:
        control.control("begin", {"mode": mode}, 30)
        send(server, group, background, weights)
        assert control.control("digest", {}, 30)["digests"] == digests(weights)
        control.control("commit", {"version": 12, "mode": mode}, 30)


def exact_in_place(reply: Any, models: Models, reference: Reference) -> None:
    """Up to the border old weights sampled. From it on new ones did, on keys and values of the old:
    neither model alone gives these log-probs.
    """
    (_, _, border), second = spans_of(reply)
    assert 0 < border < LONG and second == ("12", border, LONG)
    tokens, at = PROMPT + reply["output_ids"], len(PROMPT) - 1
    found = logprobs_of(reply)
    of_old = reference(models.a, tokens)
    old, new = of_old["logprobs"][at:], reference(models.b, tokens)["logprobs"][at:]
    assert found[:border] == pytest.approx(old[:border], abs=TOLERANCE)
    fed = at + border  # tokens that old weights computed
    assert experts_of(routing_of(reply)[:fed], of_old["routing"][:fed])
    for other in (old, new):
        differences = [abs(f - o) for f, o in zip(found[border:], other[border:], strict=True)]
        assert differences[0] > 1e-4 and sum(d > 1e-3 for d in differences) > 100
