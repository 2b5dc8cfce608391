"""One protocol: what a response is, asked of the embedded server and of the real SGLang alike.

``python tools/contract_table.py`` prints the outcomes side by side, with those of
test_contract_control.py; docs/rollout-protocol.md lists the differences that remain. What only
SGLang has is in test_server_contract.py, what only the embedded server promises (bits, refusals by
name) in tests/rollout.
"""

from typing import Any

import numpy as np
import pytest

from megarl.rollout.probe import Probe
from tests.sglang.conftest import Models
from tests.sglang.contract import (
    EOS,
    LAYERS,
    TOLERANCE,
    TOP_K,
    Reference,
    body,
    generate,
    logprobs_of,
    routing_of,
    spans_of,
)
from tests.sglang.protocol import PROMPT, ok
from tests.sglang.server import Endpoint

pytestmark = pytest.mark.timeout(1500)  # the first test may have to install SGLang


def test_every_call_needs_the_key(server: Endpoint) -> None:
    posts = ["/generate", "/pause_generation", "/init_weights_update_group", "/weights_checker"]
    posts += ["/abort_request", "/begin_weight_update", "/update_weights_from_distributed"]
    for key in (None, "wrong", server.key + "x"):
        assert {server.request("POST", path, {}, key=key)[0] for path in posts} == {401}
        assert server.request("GET", "/server_info", key=key)[0] == 401


def test_logprobs_and_counts_of_a_response(
    server: Endpoint, tiny_models: Models, reference: Reference
) -> None:
    reply = generate(server, new=24, logprob_start_len=0)
    meta, tokens = reply["meta_info"], PROMPT + reply["output_ids"]
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 24)
    assert meta["weight_version"] == "a" and spans_of(reply) == [("a", 0, 24)]
    entries = meta["input_token_logprobs"]
    assert entries[0][0] is None and [token for _, token, _ in entries] == PROMPT
    found = [value for value, _, _ in entries[1:]] + logprobs_of(reply)
    assert found == pytest.approx(reference(tiny_models.a, tokens)["logprobs"], abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.5, 1.7, 0.0])
def test_logprobs_are_of_the_tempered_distribution_and_greedy_ones_of_the_plain(
    server: Endpoint, tiny_models: Models, reference: Reference, temperature: float
) -> None:
    reply = generate(server, new=12, sampling={"temperature": temperature})
    tokens = PROMPT + reply["output_ids"]
    plain = np.array(reference(tiny_models.a, tokens)["probabilities"])[len(PROMPT) - 1 : -1]
    if temperature == 0:
        assert reply["output_ids"] == plain.argmax(-1).tolist()
    tempered = plain ** (1 / (temperature or 1.0))
    tempered /= tempered.sum(-1, keepdims=True)
    expected = np.log(tempered[np.arange(12), reply["output_ids"]])
    assert logprobs_of(reply) == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_a_stop_token_ends_a_response_and_is_part_of_it(server: Endpoint) -> None:
    """Unless end tokens are ignored: then stop tokens are, too."""
    greedy = {"temperature": 0.0}
    full = generate(server, new=30, sampling=greedy)["output_ids"]
    assert EOS not in full
    for stop in {full[0], full[5], full[-1]}:
        stopping = {**greedy, "stop_token_ids": [stop]}
        assert generate(server, new=30, sampling=stopping)["output_ids"] == full  # ignore_eos
        reply = generate(server, new=30, sampling={**stopping, "ignore_eos": False})
        assert reply["output_ids"] == full[: full.index(stop) + 1]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert len(logprobs_of(reply)) == len(reply["output_ids"])


def test_the_models_end_token_ends_a_response_unless_it_is_ignored(server: Endpoint) -> None:
    """At a temperature at which all 24 tokens are about equally likely."""
    hot = {"temperature": 20.0}
    ended = [generate(server, new=60, sampling={**hot, "ignore_eos": False}) for _ in range(4)]
    stopped = [r for r in ended if r["meta_info"]["finish_reason"]["type"] == "stop"]
    assert stopped
    for reply in stopped:
        assert reply["meta_info"]["finish_reason"]["matched"] == EOS
        assert reply["output_ids"].index(EOS) == len(reply["output_ids"]) - 1
    ignoring = [generate(server, new=60, sampling=hot)["output_ids"] for _ in range(4)]
    assert {len(ids) for ids in ignoring} == {60} and any(EOS in ids[:-1] for ids in ignoring)


def test_a_response_continued_as_a_longer_prompt_has_the_length_asked_for(
    server: Endpoint, tiny_models: Models, reference: Reference
) -> None:
    """Ten tokens, seven of them first; routing of the second piece starts where the first ended."""
    first = generate(server, new=7, return_routed_experts=True)
    start = len(PROMPT) + 7 - 1
    rest = generate(
        server,
        PROMPT + first["output_ids"],
        3,
        return_routed_experts=True,
        routed_experts_start_len=start,
    )
    tokens = PROMPT + first["output_ids"] + rest["output_ids"]
    assert len(tokens) == len(PROMPT) + 10
    assert rest["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    expected = reference(tiny_models.a, tokens)
    found = logprobs_of(first) + logprobs_of(rest)
    assert found == pytest.approx(expected["logprobs"][len(PROMPT) - 1 :], abs=TOLERANCE)
    rows = np.concatenate([routing_of(first), routing_of(rest)])
    assert rows.shape == (len(tokens) - 1, LAYERS, TOP_K)
    assert np.array_equal(np.sort(rows, -1), np.sort(expected["routing"], -1))


def test_a_batch_answers_in_its_order(server: Endpoint) -> None:
    lengths = [5, 1, 9, 3]
    prompts = [PROMPT[k:] for k in range(4)]
    params = [{"max_new_tokens": n, "temperature": 1.0, "ignore_eos": True} for n in lengths]
    batch = {"input_ids": prompts, "sampling_params": params, "rid": ["w", "x", "y", "z"]}
    replies = ok(server, "/generate", **batch, return_logprob=True)
    assert [r["meta_info"]["id"] for r in replies] == ["w", "x", "y", "z"]
    assert [len(r["output_ids"]) for r in replies] == lengths
    assert [r["meta_info"]["prompt_tokens"] for r in replies] == [len(p) for p in prompts]


@pytest.mark.parametrize(
    "limits",
    [{"top_p": 0.4}, {"top_k": 3}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 2}],
    ids=lambda limits: " ".join(f"{name} {value}" for name, value in limits.items()),
)
def test_truncated_sampling_stays_inside_and_reports_the_whole_distribution(
    server: Endpoint, tiny_models: Models, reference: Reference, limits: dict[str, Any]
) -> None:
    reply = generate(server, new=30, sampling={"temperature": 1.3, **limits})
    tokens = PROMPT + reply["output_ids"]
    plain = np.array(reference(tiny_models.a, tokens)["probabilities"])[len(PROMPT) - 1 : -1]
    tempered = plain ** (1 / 1.3)
    tempered /= tempered.sum(-1, keepdims=True)
    for token, row in zip(reply["output_ids"], tempered, strict=True):
        likelier = row[row > row[token]]
        assert likelier.sum() <= limits.get("top_p", 1) + 1e-6
        assert len(likelier) < limits.get("top_k", 99)
        assert row[token] >= limits.get("min_p", 0) * row.max() * (1 - 1e-6)
    expected = np.log(tempered[np.arange(30), reply["output_ids"]])
    assert logprobs_of(reply) == pytest.approx(expected.tolist(), abs=TOLERANCE)


# Of a context of 512 tokens: what a response lacks, without a word, and how long a prompt may be.
CONTEXT = 512
CUT_SHORT = {"embedded": 0, "sglang": 2}
LONGEST_PROMPT = {"embedded": CONTEXT - 1, "sglang": CONTEXT - 7}


def test_how_much_of_a_context_can_be_used(server: Endpoint, shared_name: str) -> None:
    reply = generate(server, new=CONTEXT - len(PROMPT))
    count = len(reply["output_ids"])
    assert count == CONTEXT - len(PROMPT) - CUT_SHORT[shared_name]
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": count}
    longest = LONGEST_PROMPT[shared_name]
    assert len(generate(server, [3] * longest, 1)["output_ids"]) == 1
    status, reply = server.post("/generate", body([3] * (longest + 1), 1))
    assert status == 400
    # Of a sequence that is continued all but its last token may be a prompt.
    assert Probe(server.url, server.key).identity().longest == longest + 1


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"sampling": {"temperature": -1.0}}, id="temperature below 0"),
        pytest.param({"sampling": {"top_p": 1.5}}, id="top_p above 1"),
        pytest.param({"sampling": {"top_k": 0}}, id="top_k of 0"),
        pytest.param({"sampling": {"min_p": 2.0}}, id="min_p above 1"),
        pytest.param({"sampling": {"max_new_tokens": -1}}, id="length below 0"),
        pytest.param({"sampling": {"max_new_tokens": 600}}, id="length beyond the context"),
        pytest.param({"input_ids": []}, id="no prompt"),
        pytest.param({"input_ids": [3] * 600}, id="prompt beyond the context"),
    ],
)
def test_what_cannot_be_sampled_is_refused_with_a_reason(
    server: Endpoint, wrong: dict[str, Any]
) -> None:
    fields = {key: value for key, value in wrong.items() if key != "sampling"}
    asked = {**body(sampling=wrong.get("sampling", {})), **fields}
    status, reply = server.post("/generate", asked)
    assert status == 400 and len(reply["error"]["message"]) > 10
    assert len(generate(server, new=2)["output_ids"]) == 2
