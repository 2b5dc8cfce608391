"""Generation by the real embedded server, against transformers' plain forward."""

import asyncio
import base64
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.conftest import CONTEXT, EOS, LAYERS, SLOTS, TOP_K, VOCAB, Reference, Server

PROMPTS = [[5], [3, 9, 14, 2], [7, 7, 20, 11, 2, 19, 4, 8, 23, 6, 12, 3, 2]]


def output_logprobs(reply: Any) -> torch.Tensor:
    triples = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == reply["output_ids"]
    return torch.tensor([value for value, _, _ in triples])


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_the_distribution_sampled(
    server: Server, reference_a: Reference, temperature: float
) -> None:
    """Greedy reports log-probs at temperature 1, as SGLang does. 1e-5: fp32, another order of
    sums."""
    for prompt in PROMPTS:
        sampling = {"temperature": temperature, "ignore_eos": True, "sampling_seed": 3}
        reply = server.generate(prompt, new=20, sampling=sampling)
        expected = reference_a.logprobs(prompt + reply["output_ids"], temperature or 1.0)
        got = output_logprobs(reply)
        torch.testing.assert_close(got, expected[len(prompt) - 1 :], atol=1e-5, rtol=0)


@pytest.mark.parametrize("start", [0, 4])
def test_input_logprobs(server: Server, reference_a: Reference, start: int) -> None:
    prompt = PROMPTS[2]
    reply = server.generate(prompt, new=3, logprob_start_len=start)
    triples = reply["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in triples] == prompt[start:]
    assert triples[0][0] is None
    got = torch.tensor([value for value, _, _ in triples[1:]])
    torch.testing.assert_close(got, reference_a.logprobs(prompt)[start:], atol=1e-5, rtol=0)


def test_no_new_token_scores_the_prompt_only(server: Server, reference_a: Reference) -> None:
    reply = server.generate(PROMPTS[1], new=0, logprob_start_len=0)
    assert reply["output_ids"] == []
    got = [value for value, _, _ in reply["meta_info"]["input_token_logprobs"]][1:]
    expected = reference_a.logprobs(PROMPTS[1])
    torch.testing.assert_close(torch.tensor(got), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("start", [0, 3])
def test_routed_experts_are_the_gates_choices(
    server: Server, reference_a: Reference, start: int
) -> None:
    prompt = PROMPTS[2]
    reply = server.generate(
        prompt, new=9, return_routed_experts=True, routed_experts_start_len=start
    )
    raw = base64.b64decode(reply["meta_info"]["routed_experts"])
    got = np.frombuffer(raw, "<i4").reshape(-1, LAYERS, TOP_K)
    tokens = prompt + reply["output_ids"]
    np.testing.assert_array_equal(got, reference_a.routing(tokens)[start:-1].numpy())


def test_greedy_is_transformers_generate(server: Server, reference_a: Reference) -> None:
    for prompt in [*PROMPTS, *([a, b] for a in (2, 5) for b in (3, 17))]:
        reply = server.generate(prompt, new=25, sampling={"temperature": 0})
        assert reply["output_ids"] == reference_a.greedy(prompt, 25)
        stopped = reply["output_ids"][-1] == EOS
        reason = {"type": "stop", "matched": EOS} if stopped else {"type": "length", "length": 25}
        assert reply["meta_info"]["finish_reason"] == reason


def test_stop_tokens_and_ignored_end(server: Server) -> None:
    """``ignore_eos`` ignores stop tokens, too, as SGLang's does."""
    shared = {"temperature": 1.0, "sampling_seed": 11}
    full = server.generate([5, 6], new=40, sampling=shared | {"ignore_eos": True})["output_ids"]
    assert len(full) == 40
    stop = next(token for token in full[5:] if token != EOS)
    short = server.generate([5, 6], new=40, sampling=shared | {"stop_token_ids": [stop]})
    end = min(full.index(token) for token in (stop, EOS) if token in full)
    assert short["output_ids"] == full[: end + 1]
    assert short["meta_info"]["finish_reason"] == {"type": "stop", "matched": full[end]}
    ignored = shared | {"stop_token_ids": [stop], "ignore_eos": True}
    assert server.generate([5, 6], new=40, sampling=ignored)["output_ids"] == full


def test_sampled_frequencies_match_the_probabilities(
    server: Server, reference_a: Reference
) -> None:
    """Pearson's chi-square with 23 degrees of freedom: below 56 in all but 1 of 7,000 draws of
    seeds."""
    n, temperature = 3000, 1.3
    params = [
        {"max_new_tokens": 1, "temperature": temperature, "sampling_seed": seed}
        for seed in range(n)
    ]
    body = {"input_ids": [PROMPTS[1]] * n, "sampling_params": params}
    replies = server.post("/generate", body)
    counts = np.bincount([r["output_ids"][0] for r in replies], minlength=VOCAB)
    expected = reference_a.next_probabilities(PROMPTS[1], temperature).numpy() * n
    assert expected.min() > 1  # else the statistic means nothing
    assert ((counts - expected) ** 2 / expected).sum() < 56


def test_a_request_has_the_same_bits_whatever_else_runs(server: Server) -> None:
    """Alone, then twice among 50 others in random order and hence in other slots and steps."""
    rng = random.Random(0)

    def ask(prompt: list[int], seed: int, new: int) -> Any:
        sampling = {"temperature": 1.0, "sampling_seed": seed}
        fields = {"logprob_start_len": 0, "return_routed_experts": True}
        reply = server.generate(prompt, new=new, sampling=sampling, **fields)
        meta = reply["meta_info"]
        names = ("output_token_logprobs", "input_token_logprobs", "routed_experts")
        return reply["output_ids"], [meta[name] for name in names]

    probes = [([rng.randrange(VOCAB) for _ in range(n)], 100 + n, 30) for n in (1, 6, 17, 30)]
    alone = [ask(*probe) for probe in probes]
    for _ in range(2):
        others = [
            (
                [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
                rng.randrange(2**40),
                rng.randint(1, 30),
            )
            for _ in range(50)
        ]
        everyone: list[Any] = [*others, *probes]
        rng.shuffle(everyone)
        with ThreadPoolExecutor(24) as pool:
            replies = list(pool.map(lambda request: ask(*request), everyone))
        together = [replies[everyone.index(probe)] for probe in probes]
        assert together == alone


def test_a_group_has_the_bits_of_its_members_asked_alone(server: Server) -> None:
    """A group's prompt is computed once for all; prompts of other groups run beside it."""
    prompts = [[3, 9, 14, 2, 8, 8], [3, 9, 14, 2, 8, 7], [11] * 30, [4]]
    batch = [prompt for prompt in prompts for _ in range(6)]
    params = [
        {"max_new_tokens": 10, "sampling_seed": i, "temperature": 0.5 + i % 3}
        for i in range(len(batch))
    ]
    fields = {"return_logprob": True, "logprob_start_len": 0, "return_routed_experts": True}

    def bits(reply: Any) -> Any:
        meta = reply["meta_info"]
        kept = ("output_token_logprobs", "input_token_logprobs", "routed_experts")
        return reply["output_ids"], [meta[name] for name in kept]

    together = server.post("/generate", {"input_ids": batch, "sampling_params": params} | fields)
    alone = [
        server.post("/generate", {"input_ids": prompt, "sampling_params": param} | fields)
        for prompt, param in zip(batch, params, strict=True)
    ]
    assert [bits(r) for r in together] == [bits(r) for r in alone]


def test_one_batch_larger_than_the_slots_answers_in_order(server: Server) -> None:
    n = 3 * SLOTS
    prompts = [[2 + i % (VOCAB - 2), 3] for i in range(n)]
    params = [{"max_new_tokens": 1 + i % 5, "sampling_seed": i} for i in range(n)]
    body = {"input_ids": prompts, "sampling_params": params, "rid": [f"r{i}" for i in range(n)]}
    replies = server.post("/generate", body)
    assert [r["meta_info"]["id"] for r in replies] == [f"r{i}" for i in range(n)]
    alone = server.post("/generate", {"input_ids": prompts[70], "sampling_params": params[70]})
    assert replies[70]["output_ids"] == alone["output_ids"]


def test_without_a_seed_draws_differ(server: Server) -> None:
    body = {"input_ids": [[5, 9]] * 8, "sampling_params": {"max_new_tokens": 20}}
    assert len({tuple(r["output_ids"]) for r in server.post("/generate", body)}) > 1


BAD_BODIES: list[tuple[str, Any]] = [
    ("body", [1, 2]),
    ("body", b"{not json"),
    ("body", b"[" * 100_000),
    ("input_ids", {}),
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": "3 4"}),
    ("input_ids", {"input_ids": {"0": 3}}),
    ("input_ids[1]", {"input_ids": [3, VOCAB]}),
    ("input_ids[0]", {"input_ids": [-1]}),
    ("input_ids[0]", {"input_ids": [3.0]}),
    ("input_ids[0]", {"input_ids": [True]}),
    ("input_ids[1]", {"input_ids": [[3], []]}),
    ("input_ids[1]", {"input_ids": [[3], 4]}),
    ("max_new_tokens", {"input_ids": [3] * 60, "sampling_params": {"max_new_tokens": 5}}),
    ("max_new_tokens", {"input_ids": [3], "sampling_params": {"max_new_tokens": -1}}),
    ("max_new_tokens", {"input_ids": [3], "sampling_params": {"max_new_tokens": "4"}}),
    ("max_new_tokens", {"input_ids": [3]}),  # the default, 128, does not fit
    ("temperature", {"input_ids": [3], "sampling_params": {"temperature": float("nan")}}),
    ("temperature", {"input_ids": [3], "sampling_params": {"temperature": float("inf")}}),
    ("temperature", {"input_ids": [3], "sampling_params": {"temperature": -1}}),
    ("temperature", {"input_ids": [3], "sampling_params": {"temperature": 10**400}}),
    ("temperature", {"input_ids": [3], "sampling_params": {"temperature": "hot"}}),
    ("sampling_seed", {"input_ids": [3], "sampling_params": {"sampling_seed": 2**63}}),
    ("sampling_seed", {"input_ids": [3], "sampling_params": {"sampling_seed": 1.5}}),
    ("top_p", {"input_ids": [3], "sampling_params": {"top_p": 0}}),
    ("top_p", {"input_ids": [3], "sampling_params": {"top_p": 1.01}}),
    ("top_k", {"input_ids": [3], "sampling_params": {"top_k": 0}}),
    ("top_k", {"input_ids": [3], "sampling_params": {"top_k": 2.5}}),
    ("min_p", {"input_ids": [3], "sampling_params": {"min_p": -0.1}}),
    ("min_p", {"input_ids": [3], "sampling_params": {"min_p": "0.1"}}),
    ("frequency_penalty", {"input_ids": [3], "sampling_params": {"frequency_penalty": 0.5}}),
    *(
        (f"sampling_params.{field}", {"input_ids": [3], "sampling_params": {field: value}})
        for field, value in {
            "logit_bias": {"3": 8.0},
            "min_new_tokens": 1,
            "stop": ["x"],
            "stop_regex": "x+",
            "json_schema": "{}",
            "regex": "x+",
            "ebnf": "root ::= x",
            "structural_tag": "{}",
            "custom_params": {"thinking_budget": 3},
            "n": 2,
            "beam_width": 2,
        }.items()
    ),
    ("temprature", {"input_ids": [3], "sampling_params": {"temprature": 1}}),
    ("stop_token_ids", {"input_ids": [3], "sampling_params": {"stop_token_ids": [99]}}),
    ("sampling_params", {"input_ids": [3], "sampling_params": [1]}),
    ("sampling_params", {"input_ids": [[3], [4]], "sampling_params": [{}]}),
    ("ignore_eos", {"input_ids": [3], "sampling_params": {"ignore_eos": 1}}),
    ("rid", {"input_ids": [[3], [4]], "rid": ["a", "a"]}),
    ("rid", {"input_ids": [3], "rid": 5}),
    ("logprob_start_len", {"input_ids": [3], "logprob_start_len": 9, "return_logprob": True}),
    ("return_logprob", {"input_ids": [3], "return_logprob": "yes"}),
    ("stream", {"input_ids": [3], "stream": True}),
    ("text", {"input_ids": [3], "text": "hello"}),
]


@pytest.mark.parametrize(("field", "body"), BAD_BODIES)
def test_bad_input_is_refused_by_name(server: Server, field: str, body: Any) -> None:
    if isinstance(body, dict) and "input_ids" in body and "max_new_tokens" not in field:
        params = body.get("sampling_params")
        if isinstance(params, dict):
            body = body | {"sampling_params": {"max_new_tokens": 2, **params}}
        elif params is None:
            body = body | {"sampling_params": {"max_new_tokens": 2}}
    status, reply = server.call("POST", "/generate", body)
    assert status == 400
    assert field in reply["error"]["message"]
    assert "accepted: " in reply["error"]["message"]


def test_every_call_needs_the_key(server: Server) -> None:
    for method, path in (("POST", "/generate"), ("GET", "/health"), ("POST", "/nothing")):
        for key in ("", "wrong", server.key + "x", "\xff"):
            status, reply = server.call(method, path, {}, key=key)
            assert (status, reply) == (401, {"error": "Unauthorized"})


def test_a_body_beyond_the_limit_is_refused(server: Server) -> None:
    status, _ = server.call("POST", "/generate", b" " * (65 * 2**20))
    assert status == 413


def test_unknown_paths_and_pickles_lead_nowhere(server: Server) -> None:
    assert server.call("POST", "/update_weights_from_tensor", {})[0] == 404
    assert server.call("GET", "/generate")[0] == 405
    pickled = b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00N."
    for path in ("/generate", "/update_weights_from_distributed", "/update_weights_from_disk"):
        assert server.call("POST", path, pickled)[0] == 400


def test_health_and_descriptions(server: Server) -> None:
    for path in ("/health", "/health_generate"):
        assert server.call("GET", path)[0] == 200
    info = server.get("/model_info")
    assert info == server.get("/get_model_info")
    assert info["weight_version"] == "0"
    assert info["model_path"] == str(server.model)
    state = server.get("/server_info")
    assert (state["max_running_requests"], state["context_length"]) == (SLOTS, CONTEXT)


def test_the_same_id_cannot_run_twice(server: Server) -> None:
    server.post("/pause_generation", {"mode": "retract"})
    body = {"input_ids": [3, 4], "rid": "twin", "sampling_params": {"max_new_tokens": 2}}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.call, "POST", "/generate", body)
        wait_for(lambda: server.get("/server_info")["waiting"] == 1)
        status, reply = server.call("POST", "/generate", body)
        assert status == 400 and "twin" in reply["error"]["message"]
        server.post("/continue_generation")
        assert first.result()[0] == 200
    assert server.call("POST", "/generate", body)[0] == 200  # free again


def test_a_caller_that_hangs_up_frees_its_slot(server: Server) -> None:
    server.post("/pause_generation", {"mode": "in_place"})
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}}'
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: server.get("/server_info")["waiting"] == 1)
    wait_for(lambda: server.get("/server_info")["waiting"] == 0)


def test_the_http_side_answers_while_the_engine_computes(server: Server) -> None:
    async def ask_around() -> list[float]:
        loop = asyncio.get_running_loop()
        prompts = [[3, i % VOCAB] for i in range(SLOTS)]
        params = {"max_new_tokens": 60, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": params}
        work = loop.run_in_executor(None, server.post, "/generate", body)
        delays = []
        while not work.done():
            start = time.monotonic()
            await loop.run_in_executor(None, server.get, "/health")
            delays.append(time.monotonic() - start)
        await work
        return delays

    delays = asyncio.run(ask_around())
    assert len(delays) > 3 and sorted(delays)[len(delays) // 2] < 0.5


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
