"""What a collector makes of a server's words: nothing but what was said, token for token."""

import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megarl.rollout.collector import Collector, CollectorSettings
from megarl.types import GroupOutcome, GroupRequest, Member, Prompt, Sample, Sampling
from tests.truth.proxy import Proxy
from tests.truth.served import PROMPTS, Address, routing_of

EOS, GROUP = 1, 6
NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def collecting(
    proxy: Proxy, key: str, model: Path, tokenizer: Path, folder: Path
) -> Iterator[Collector]:
    """From the server behind the proxy, with routed experts."""
    (folder / "key").write_text(f"{key}\n")
    (folder / "key").chmod(0o600)
    collector = Collector(
        CollectorSettings(
            hf=tokenizer,
            eos_ids=(EOS,),
            reward="import:tests.rollout.rewards:as_told",
            key_file=folder / "key",
            log_file=folder / "collector_0.log",
            routing=routing_of(model),
        )
    )
    try:
        collector.serve_from([Member("server 0", proxy.url, "1")])
        yield collector
    finally:
        collector.close()


def requests(number: int, limit: int, temperature: float = 1.0) -> list[GroupRequest]:
    """A group of every prompt; of all rounds, no two samples have a seed in common."""
    first = number * len(PROMPTS)
    return [
        GroupRequest(
            serial,
            1,
            Prompt(f"p{serial}", prompt, {"reward": 1.0}),
            tuple(GROUP * serial + i for i in range(GROUP)),
            Sampling(temperature, limit),
        )
        for serial, prompt in enumerate(PROMPTS, first)
    ]


def interrupt(server: Address) -> None:
    """Everything that runs ends with what it has, and goes on when it is asked for again."""
    for path, body in (("/pause_generation", {"mode": "abort"}), ("/continue_generation", {})):
        request = urllib.request.Request(
            server.url + path,
            orjson.dumps(body),
            {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"},
        )
        with _OPENER.open(request, timeout=60) as reply:
            assert reply.status == 200


def run(
    collector: Collector, proxy: Proxy, server: Address, *, limit: int, after_s: float = 0.02
) -> tuple[Counter[str], list[Sample]]:
    """Rounds of all prompts, each interrupted soon after it was asked for, until some sample was
    stopped half-way. What ``check`` counts, and the last round's samples.
    """
    counts: Counter[str] = Counter()
    outcomes: list[GroupOutcome] = []
    for number in range(10):
        asked = requests(number, limit)
        proxy.asked.clear()
        collector.issue(asked)
        for _ in range(2):
            assert proxy.asked.wait(60)
            time.sleep(after_s)
            interrupt(server)
        outcomes = []
        while len(outcomes) < len(asked):
            collector.wait(1, 60.0)
            outcomes += collector.take()
            assert not collector.suspects()
        counts += check(outcomes, asked, proxy)
        if counts["continued"]:
            break
    return counts, [sample for outcome in outcomes for sample in outcome.samples]


def check(
    outcomes: Sequence[GroupOutcome],
    asked: Sequence[GroupRequest],
    proxy: Proxy,
) -> Counter[str]:
    """How many samples ended by the end token ("stop"), by the limit ("length"), and how many of
    them were "continued".
    """
    counts: Counter[str] = Counter()
    said = _by_seed(proxy)
    by_serial = {outcome.serial: outcome for outcome in outcomes}
    for group in asked:
        outcome = by_serial[group.serial]
        assert not outcome.failed and not outcome.discarded
        for seed, sample in zip(group.seeds, outcome.samples, strict=True):
            counts += _check_sample(sample, group, said[seed])
    return counts


def _by_seed(proxy: Proxy) -> dict[int, list[tuple[Any, Any, Any]]]:
    """seed -> (input ids, sampling parameters, reply) of every time it was asked for."""
    found: dict[int, list[tuple[Any, Any, Any]]] = {}
    for e in proxy.of("/generate"):
        assert e.status == 200, e
        sampling = e.body["sampling_params"]
        for ids, given, reply in zip(e.body["input_ids"], sampling, e.reply, strict=True):
            found.setdefault(given["sampling_seed"], []).append((ids, given, reply))
    return found


def _at_its_end(tokens: list[int], limit: int) -> bool:
    return len(tokens) == limit or tokens[-1] == EOS


def _check_sample(
    sample: Sample, group: GroupRequest, parts: Sequence[tuple[Any, Any, Any]]
) -> Counter[str]:
    prompt, limit = list(group.prompt.token_ids), group.sampling.max_new_tokens
    tokens: list[int] = []
    logprobs: list[float] = []
    finish, continued = "abort", False
    for ids, given, reply in parts:
        assert finish == "abort", "it was whole and is asked for again"
        if tokens and ids == prompt:
            assert _at_its_end(tokens, limit)
            tokens, logprobs = [], []  # the experts of its last tokens will never be known
        assert ids == prompt + tokens
        assert given["max_new_tokens"] == limit - len(tokens) > 0
        assert given["ignore_eos"] is False
        assert given["temperature"] == group.sampling.temperature
        assert {name: given[name] for name in NEUTRAL} == NEUTRAL
        continued |= bool(tokens)
        tokens += reply["output_ids"]
        triples = reply["meta_info"]["output_token_logprobs"]
        assert [t[1] for t in triples] == reply["output_ids"]
        logprobs += [t[0] for t in triples]
        finish = reply["meta_info"]["finish_reason"]["type"]
    if _at_its_end(tokens, limit):  # also where a pause came just then
        finish = "stop" if tokens[-1] == EOS else "length"
    assert EOS not in tokens[:-1]
    assert (tokens[-1] == EOS) == (finish == "stop")
    assert finish == "stop" or len(tokens) == limit
    assert sample.tokens.tolist() == prompt + tokens
    assert sample.mask.tolist() == [False] * len(prompt) + [True] * len(tokens)
    expected = [0.0] * len(prompt) + [float(np.float32(v)) for v in logprobs]
    assert sample.rollout_logprobs.tolist() == expected
    assert sample.truncated == (finish == "length")
    return Counter({finish: 1, "continued": int(continued)})
