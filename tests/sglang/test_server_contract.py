"""What megarl relies on in SGLang's protocol, asked of the real server.

Each test that depends on the weights being served loads them first: the server is shared.
"""

import base64
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.sglang.protocol import (
    PROMPT,
    digests,
    generate,
    generating,
    joined_group,
    ok,
    prompt_logprobs,
    received,
    send,
)
from tests.sglang.server import SGLangServer

# The first test of a session may have to install SGLang, and waits for the server to start.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

LAYERS, TOP_K = 4, 2

# float32 on both sides, sums in another order: 5e-6 was seen over many prompts.
TOLERANCE = 1e-5


def serve(server: SGLangServer, model: Path, version: str) -> None:
    ok(server, "/update_weights_from_disk", model_path=str(model), weight_version=version)


@pytest.fixture(scope="module")
def in_background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def group(
    sglang_server: SGLangServer, in_background: ThreadPoolExecutor
) -> Iterator[dist.ProcessGroup]:
    with joined_group(sglang_server, in_background, num_server_ranks=1) as group:
        yield group


@pytest.fixture(autouse=True)
def closed_again(sglang_server: SGLangServer) -> Iterator[None]:
    """A test that fails midway must not leave the shared server paused or in an update."""
    yield
    sglang_server.post("/end_weight_update")  # refused where none is open
    sglang_server.post("/continue_generation")


def test_requests_without_the_key_or_with_another_are_refused(sglang_server):
    for path, key in (
        ("/generate", None),
        ("/generate", "wrong"),
        ("/pause_generation", None),
        ("/init_weights_update_group", None),
        ("/weights_checker", "wrong"),
    ):
        status, _ = sglang_server.request("POST", path, {}, key=key)
        assert status == 401, path


def test_logprobs_of_prompt_and_samples_equal_transformers(sglang_server, tiny_models, reference):
    serve(sglang_server, tiny_models.a, "at-a")
    reply = generate(sglang_server, num_tokens=24, logprob_start_len=0)
    meta = reply["meta_info"]
    sampled = [entry[1] for entry in meta["output_token_logprobs"]]
    assert reply["output_ids"] == sampled and len(sampled) == 24
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert meta["weight_version"] == "at-a"

    logprobs = [
        entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    ]
    expected = reference(tiny_models.a, PROMPT + sampled)["logprobs"]
    assert logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_routed_experts_cover_all_but_the_last_token_and_equal_transformers(
    sglang_server, tiny_models, reference
):
    serve(sglang_server, tiny_models.a, "at-a")
    reply = generate(sglang_server, num_tokens=9, return_routed_experts=True)
    raw = base64.b64decode(reply["meta_info"]["routed_experts"])
    tokens = PROMPT + reply["output_ids"]
    experts = np.frombuffer(raw, dtype=np.int32).reshape(len(tokens) - 1, LAYERS, TOP_K)
    expected = np.array(reference(tiny_models.a, tokens)["routing"])
    assert np.array_equal(np.sort(experts, -1), np.sort(expected, -1))


def test_nothing_is_sampled_while_paused_and_requests_go_on_afterwards(
    sglang_server, in_background
):
    running = generating(sglang_server, in_background, num_tokens=300)
    ok(sglang_server, "/pause_generation", mode="retract")
    waiting = in_background.submit(generate, sglang_server, num_tokens=3)
    time.sleep(1.0)  # time enough to finish both, were it not paused
    assert not running.done() and not waiting.done()
    ok(sglang_server, "/continue_generation")
    assert len(running.result(timeout=60)["output_ids"]) == 300
    assert len(waiting.result(timeout=60)["output_ids"]) == 3


def test_pausing_by_abort_returns_what_was_sampled_so_far(sglang_server, in_background):
    running = generating(sglang_server, in_background, num_tokens=400)
    ok(sglang_server, "/pause_generation", mode="abort")
    reply = running.result(timeout=60)
    ok(sglang_server, "/continue_generation")
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < 400
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])


def test_weights_pushed_over_a_group_arrive_bit_for_bit_and_are_served(
    sglang_server, group, in_background, tiny_models, reference
):
    serve(sglang_server, tiny_models.a, "before")
    weights = load_file(tiny_models.b / "model.safetensors")
    running = generating(sglang_server, in_background, num_tokens=300)

    ok(sglang_server, "/pause_generation", mode="retract")
    ok(sglang_server, "/begin_weight_update")
    assert received(sglang_server)[0] == {}
    send(sglang_server, group, in_background, weights)
    assert received(sglang_server)[0] == digests(weights)
    ok(sglang_server, "/end_weight_update")
    ok(sglang_server, "/flush_cache")
    ok(sglang_server, "/update_weight_version", new_version="after", abort_all_requests=False)
    ok(sglang_server, "/continue_generation")

    assert received(sglang_server)[0] == digests(weights)
    logprobs = prompt_logprobs(sglang_server)
    assert logprobs == pytest.approx(reference(tiny_models.b, PROMPT)["logprobs"], abs=TOLERANCE)
    _, info = sglang_server.request("GET", "/model_info", key=sglang_server.key)
    assert info["weight_version"] == "after"

    # The request that lived through the push says which token came from which weights.
    meta = running.result(timeout=60)["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == ("before", "after")
    assert first["end"] == second["start"] and second["end"] - first["start"] == 300


def test_a_tensor_that_arrives_changed_or_not_at_all_shows_in_the_digests(
    sglang_server, group, in_background, tiny_models
):
    weights = load_file(tiny_models.b / "model.safetensors")
    expected = digests(weights)
    changed, lost = "model.layers.2.mlp.experts.5.up_proj.weight", "model.norm.weight"
    weights[changed].view(torch.int32)[0, 0] ^= 1  # the lowest bit of one number
    del weights[lost]

    ok(sglang_server, "/begin_weight_update")
    send(sglang_server, group, in_background, weights)
    ok(sglang_server, "/end_weight_update")
    reported = received(sglang_server)[0]
    assert expected.keys() - reported.keys() == {lost}
    assert [name for name in reported if reported[name] != expected[name]] == [changed]


def test_sglangs_own_checksum_agrees_between_a_push_and_the_same_weights_from_disk(
    sglang_server, group, in_background, tiny_models
):
    serve(sglang_server, tiny_models.b, "disk")
    from_disk = ok(sglang_server, "/weights_checker", action="checksum")["per_engine_checksum"]
    serve(sglang_server, tiny_models.a, "disk")
    other = ok(sglang_server, "/weights_checker", action="checksum")["per_engine_checksum"]
    ok(sglang_server, "/begin_weight_update")
    send(sglang_server, group, in_background, load_file(tiny_models.b / "model.safetensors"))
    ok(sglang_server, "/end_weight_update")
    pushed = ok(sglang_server, "/weights_checker", action="checksum")["per_engine_checksum"]
    assert pushed == from_disk != other


def test_an_update_needs_a_begin_and_a_skipped_record_is_not_an_empty_one(sglang_server):
    tensors = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    body = {**tensors, "group_name": "weights", "load_format": "flattened_bucket"}
    status, reply = sglang_server.post("/update_weights_from_distributed", body)
    assert status == 400 and "begin_weight_update" in reply["message"]

    ok(sglang_server, "/weights_checker", action="digest_skip")
    ok(sglang_server, "/begin_weight_update")
    status, reply = sglang_server.post("/weights_checker", {"action": "digest"})
    ok(sglang_server, "/end_weight_update")
    assert status == 400 and "not recorded" in reply["message"]

    ok(sglang_server, "/begin_weight_update")  # the skip was for one update only
    assert received(sglang_server)[0] == {}
    ok(sglang_server, "/end_weight_update")
