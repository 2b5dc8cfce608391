"""One protocol: aborts, pauses and weights, asked of the embedded server and of the real SGLang."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from megarl.errors import ServerError
from megarl.rollout.control import ServerControl
from megarl.sync.group import create_store, join_group, leave_group
from tests.sglang.conftest import Models
from tests.sglang.contract import (
    LONG,
    TOLERANCE,
    Reference,
    body,
    exact_in_place,
    experts_of,
    generate,
    logprobs_of,
    ok_within,
    pushed,
    routing_of,
    running,
    spans_of,
)
from tests.sglang.protocol import PROMPT, digests, joined_group, ok, send
from tests.sglang.server import Endpoint

pytestmark = pytest.mark.timeout(1500)  # the first test may have to install SGLang


def test_an_abort_by_id_ends_that_request_with_what_it_has(
    server: Endpoint, background: ThreadPoolExecutor
) -> None:
    other = background.submit(generate, server, PROMPT, LONG + 20, rid="other")
    one = running(server, background, rid="one")
    for rid in ("", "nobody", "one"):
        ok(server, "/abort_request", rid=rid)
    reply = one.result(60)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < LONG
    assert spans_of(reply) == [("a", 0, len(reply["output_ids"]))]
    assert len(logprobs_of(reply)) == len(reply["output_ids"])
    assert len(other.result(60)["output_ids"]) == LONG + 20


def test_an_abort_of_all_ends_what_runs_and_what_waits(
    server: Endpoint, background: ThreadPoolExecutor
) -> None:
    """Twelve, of which eight run at a time."""
    batch = body([PROMPT] * 12, 300)  # type: ignore[list-item]
    future = background.submit(ok, server, "/generate", **batch)
    while server.post("/flush_cache")[0] == 200:
        time.sleep(0.01)
    time.sleep(0.1)
    ok(server, "/abort_request", abort_all=True)
    replies = future.result(60)
    assert [r["meta_info"]["finish_reason"]["type"] for r in replies] == ["abort"] * 12
    assert sum(bool(r["output_ids"]) for r in replies) >= 1
    assert all(len(r["output_ids"]) < 300 for r in replies)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_nothing_is_sampled_in_a_pause_and_requests_go_on_after_it(
    server: Endpoint, background: ThreadPoolExecutor, mode: str
) -> None:
    future = running(server, background)
    ok(server, "/pause_generation", mode=mode)
    waiting = background.submit(generate, server, PROMPT, 3)
    ok(server, "/update_weight_version", new_version="later", abort_all_requests=False)
    time.sleep(0.8)
    assert not future.done() and not waiting.done()
    status, _ = server.post("/flush_cache")
    assert status == {"retract": 200, "in_place": 400}[mode]
    ok(server, "/continue_generation")
    reply = future.result(60)
    assert len(reply["output_ids"]) == LONG
    (first, start, border), (second, again, end) = spans_of(reply)
    assert (first, start, second, end) == ("a", 0, "later", LONG) and border == again
    assert spans_of(waiting.result(60)) == [("later", 0, 3)]


def test_a_pause_by_abort_gives_back_what_there_is(
    server: Endpoint, background: ThreadPoolExecutor
) -> None:
    future = running(server, background)
    ok(server, "/pause_generation", mode="abort")
    reply = future.result(60)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < LONG
    assert len(logprobs_of(reply)) == len(reply["output_ids"])
    waiting = background.submit(generate, server, PROMPT, 3)
    time.sleep(0.3)
    assert not waiting.done()
    assert ok_within(server, "/flush_cache", 5.0)
    ok(server, "/continue_generation")
    assert len(waiting.result(60)["output_ids"]) == 3


def test_a_caller_that_hangs_up_is_not_sampled_for_any_longer(server: Endpoint) -> None:
    """Then nothing runs: the cache can be emptied long before 450 tokens are sampled."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body(new=450)).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
        while server.post("/flush_cache")[0] == 200:  # it has not begun
            time.sleep(0.05)
    assert ok_within(server, "/flush_cache", 10.0)


def test_health_is_asked_by_sampling_also_of_a_busy_server(
    server: Endpoint, background: ThreadPoolExecutor
) -> None:
    for path in ("/health", "/health_generate"):
        assert server.request("GET", path, key=server.key)[0] == 200
    future = running(server, background)
    assert server.request("GET", "/health_generate", key=server.key)[0] == 200
    future.result(60)


# --- weights --------------------------------------------------------------------------------------


def test_weights_over_a_group_in_mid_response(
    server: Endpoint,
    background: ThreadPoolExecutor,
    tiny_models: Models,
    reference: Reference,
    shared_name: str,
) -> None:
    """Tokens before it are of a, those after it of b over the whole prefix: spans are exact. SGLang
    reads experts when all is done, and has those of b for all.
    """
    future = running(server, background, return_routed_experts=True)
    pushed(server, background, tiny_models.b, "retract")
    reply = future.result(60)
    (_, _, border), second = spans_of(reply)
    assert 0 < border < LONG and second == ("12", border, LONG)
    tokens, at = PROMPT + reply["output_ids"], len(PROMPT) - 1
    of_a, of_b = (reference(m, tokens) for m in (tiny_models.a, tiny_models.b))
    expected = of_a["logprobs"][at:][:border] + of_b["logprobs"][at:][border:]
    assert logprobs_of(reply) == pytest.approx(expected, abs=TOLERANCE)
    rows, fed = routing_of(reply), at + border  # tokens that a has computed
    assert experts_of(rows[:fed], of_a["routing"][:fed]) == (shared_name == "embedded")
    assert experts_of(rows[:fed], of_b["routing"][:fed]) == (shared_name == "sglang")
    assert experts_of(rows[fed:], of_b["routing"][fed:])
    assert server.request("GET", "/model_info", key=server.key)[1]["weight_version"] == "12"


def test_weights_that_come_with_an_abort_give_back_what_old_ones_sampled(
    server: Endpoint, background: ThreadPoolExecutor, tiny_models: Models, reference: Reference
) -> None:
    future = running(server, background, return_routed_experts=True)
    pushed(server, background, tiny_models.b, "abort")
    reply = future.result(60)
    count = len(reply["output_ids"])
    assert 0 < count < LONG and spans_of(reply) == [("a", 0, count)]
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    fed = len(PROMPT) + count - 1
    more = {"return_routed_experts": True, "routed_experts_start_len": fed}
    rest = generate(server, PROMPT + reply["output_ids"], LONG - count, **more)
    assert spans_of(rest) == [("12", 0, LONG - count)]
    tokens, at = PROMPT + reply["output_ids"] + rest["output_ids"], len(PROMPT) - 1
    of_a, of_b = (reference(m, tokens) for m in (tiny_models.a, tiny_models.b))
    found = logprobs_of(reply) + logprobs_of(rest)
    expected = of_a["logprobs"][at:][:count] + of_b["logprobs"][at:][count:]
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert experts_of(routing_of(reply), of_a["routing"][:fed])
    assert experts_of(routing_of(rest), of_b["routing"][fed:])


def test_weights_in_place_are_exact_to_the_token_or_refused(
    server: Endpoint,
    background: ThreadPoolExecutor,
    tiny_models: Models,
    reference: Reference,
    shared_name: str,
) -> None:
    """SGLang overlaps steps unless it is told not to (test_push.py), and would name one token's
    version wrong.
    """
    future = running(server, background, return_routed_experts=True)
    if shared_name == "sglang":
        control = ServerControl(server.url, server.key)
        with pytest.raises(ServerError, match="--disable-overlap-schedule"):
            control.control("begin", {"mode": "in_place"}, 30)
        assert spans_of(future.result(60)) == [("a", 0, LONG)]  # it has not been paused
        return
    pushed(server, background, tiny_models.b, "in_place")
    exact_in_place(future.result(60), tiny_models, reference)


def test_a_tensor_that_arrives_changed_shows_in_the_digests(
    server: Endpoint, background: ThreadPoolExecutor, tiny_models: Models
) -> None:
    weights = load_file(tiny_models.b / "model.safetensors")
    expected = digests(weights)
    changed = "model.layers.2.mlp.experts.5.up_proj.weight"
    weights[changed].view(torch.int32)[0, 0] ^= 1  # the lowest bit of one number
    control = ServerControl(server.url, server.key)
    with joined_group(server, background, num_server_ranks=1) as group:
        control.control("begin", {}, 30)
        send(server, group, background, weights)
        held = control.control("digest", {}, 30)["digests"]
    assert held.keys() == expected.keys()
    assert [name for name in held if held[name] != expected[name]] == [changed]


def test_weights_need_a_begin_and_an_update_left_open_is_begun_anew(
    server: Endpoint, background: ThreadPoolExecutor, tiny_models: Models
) -> None:
    weights = load_file(tiny_models.b / "model.safetensors")
    control = ServerControl(server.url, server.key)
    with joined_group(server, background, num_server_ranks=1) as group:
        norm = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
        with pytest.raises(ServerError, match="begin_weight_update"):
            control.control("receive", {**norm, "group_name": "weights"}, 30)
        control.control("begin", {}, 30)
        send(server, group, background, dict(list(weights.items())[:3]))
        control.control("begin", {}, 30)
        send(server, group, background, weights)
        assert control.control("digest", {}, 30)["digests"] == digests(weights)
        control.control("commit", {"version": 3}, 30)
    assert generate(server, new=1)["meta_info"]["weight_version"] == "3"


def test_a_sender_that_goes_away_fails_the_receive_at_once_and_the_next_one_mends_it(
    server: Endpoint, background: ThreadPoolExecutor, tiny_models: Models
) -> None:
    weights = load_file(tiny_models.b / "model.safetensors")
    control = ServerControl(server.url, server.key)
    store, port = create_store("127.0.0.1", timeout_s=30)
    name = {"group_name": "short"}
    join = {"master_address": store.host, "master_port": port, "rank_offset": 1, "world_size": 2}
    joining = background.submit(
        control.control, "join_group", {**join, **name, "backend": "gloo"}, 30
    )
    ours = {"rank": 0, "world_size": 2, "backend": "gloo", "timeout_s": 30.0}
    group = join_group(store, group_name="short", **ours)
    joining.result()
    control.control("begin", {}, 30)
    norm = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    pending = background.submit(control.control, "receive", {**norm, **name}, 30)
    time.sleep(0.3)
    assert not pending.done()
    leave_group(group)
    del group
    start = time.monotonic()
    with pytest.raises(ServerError, match="Connection closed"):
        pending.result(30)
    assert time.monotonic() - start < 10
    with joined_group(server, background, num_server_ranks=1) as group:
        control.control("begin", {}, 30)
        send(server, group, background, weights)
        assert control.control("digest", {}, 30)["digests"] == digests(weights)
        control.control("commit", {"version": 4}, 30)
    assert generate(server, new=1)["meta_info"]["weight_version"] == "4"


def test_a_version_can_be_named_without_ending_requests(
    server: Endpoint, background: ThreadPoolExecutor
) -> None:
    future = running(server, background)
    ok(server, "/update_weight_version", new_version="b", abort_all_requests=False)
    reply = future.result(60)
    assert [version for version, *_ in spans_of(reply)] == ["a", "b"]
    future = running(server, background)
    ok(server, "/update_weight_version", new_version="c")
    assert future.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
