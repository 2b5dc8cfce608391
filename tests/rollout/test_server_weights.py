"""Pauses, versions and weight updates of the real embedded server."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.errors import ServerError
from megarl.ops import digest
from megarl.rollout.control import ServerControl
from megarl.sync.group import create_store, join_group, leave_group
from megarl.sync.stream import flatten, specs_of
from tests.rollout.conftest import SLOTS, Reference, Server
from tests.rollout.test_server_generate import output_logprobs, wait_for
from tests.sync.bucketing import bucketize

CROWD = 3 * SLOTS


def long_of(i: int) -> int:
    """Response lengths differ, so that not all sequences begin and end in the same steps."""
    return 30 + i % 21


@pytest.fixture
def crowd(server: Server) -> Iterator["Crowd"]:
    with ThreadPoolExecutor(4) as pool:
        yield Crowd(server, pool)
        state = server.get("/server_info")
        if state["paused"] and not state["updating"]:
            server.post("/continue_generation")


class Crowd:
    """More long requests than slots: what happens meanwhile happens in mid-generation."""

    def __init__(self, server: Server, pool: ThreadPoolExecutor) -> None:
        self._server, self._pool = server, pool

    def start(self, count: int = CROWD, prefix: str = "c") -> Future[Any]:
        body = {
            "input_ids": [[3 + i % 20, 5, 7] for i in range(count)],
            "sampling_params": [
                {"max_new_tokens": long_of(i), "ignore_eos": True, "sampling_seed": i}
                for i in range(count)
            ],
            "rid": [f"{prefix}{i}" for i in range(count)],
            "return_logprob": True,
        }
        steps = self._server.get("/server_info")["steps"]
        future = self._pool.submit(self._server.call, "POST", "/generate", body)
        wait_for(lambda: self._server.get("/server_info")["steps"] > steps + 12)
        return future


def spans_of(reply: Any) -> list[tuple[str, int, int]]:
    return [(s["version"], s["start"], s["end"]) for s in reply["meta_info"]["weight_versions"]]


def test_nothing_is_sampled_while_paused_and_retracted_requests_go_on(
    server: Server, crowd: Crowd
) -> None:
    undisturbed = crowd.start().result()[1]
    future = crowd.start()
    server.post("/pause_generation", {"mode": "retract"})
    before = server.get("/server_info")
    assert before["running"] == 0 and before["waiting"] > 0
    assert server.call("POST", "/flush_cache")[0] == 200
    time.sleep(0.2)
    assert server.get("/server_info")["steps"] == before["steps"]
    server.post("/continue_generation")
    status, replies = future.result()
    assert status == 200
    # The same weights, fed anew: retraction leaves no trace, to the bit.
    assert [r["output_ids"] for r in replies] == [r["output_ids"] for r in undisturbed]
    assert [output_logprobs(r).tolist() for r in replies] == [
        output_logprobs(r).tolist() for r in undisturbed
    ]


def test_pausing_in_place_keeps_the_cache(server: Server, crowd: Crowd) -> None:
    future = crowd.start()
    server.post("/pause_generation", {"mode": "in_place"})
    status, text = server.call("POST", "/flush_cache")
    assert status == 400 and "in use" in text
    server.post("/continue_generation")
    replies = future.result()[1]
    assert [len(r["output_ids"]) for r in replies] == [long_of(i) for i in range(CROWD)]


def test_pausing_with_abort_returns_what_there_is(server: Server, crowd: Crowd) -> None:
    future = crowd.start()
    server.post("/pause_generation", {"mode": "abort"})
    _, replies = future.result()
    aborted = [r for r in replies if r["meta_info"]["finish_reason"]["type"] == "abort"]
    assert len(aborted) >= SLOTS
    assert all(len(output_logprobs(r)) == len(r["output_ids"]) for r in aborted)
    assert any(r["output_ids"] for r in aborted)


def test_abort_by_id_and_of_all(server: Server, crowd: Crowd) -> None:
    future = crowd.start()
    server.post("/abort_request", {"rid": ""})  # an empty id aborts nothing
    server.post("/abort_request", {"rid": "nobody"})
    server.post("/abort_request", {"rid": f"c{CROWD - 1}"})
    replies = future.result()[1]
    ends = [r["meta_info"]["finish_reason"]["type"] for r in replies]
    assert ends == ["length"] * (CROWD - 1) + ["abort"]
    short = len(replies[-1]["output_ids"])
    assert short < long_of(CROWD - 1) and spans_of(replies[-1]) == [("0", 0, short)]
    future = crowd.start(prefix="d")
    server.post("/abort_request", {"abort_all": True})
    ends = [r["meta_info"]["finish_reason"]["type"] for r in future.result()[1]]
    assert ends.count("abort") >= SLOTS


def test_bodies_are_compulsory_where_sglang_wants_them(server: Server) -> None:
    for path in (
        "/pause_generation",
        "/continue_generation",
        "/begin_weight_update",
        "/end_weight_update",
        "/abort_request",
        "/update_weight_version",
        "/init_weights_update_group",
    ):
        status, reply = server.call("POST", path, b"")
        assert (status, reply["object"], reply["code"]) == (400, "error", 400)
    status, reply = server.call("POST", "/pause_generation", {"mode": "softly"})
    assert status == 400 and "mode: found 'softly'" in reply["message"]
    status, reply = server.call("POST", "/update_weight_version", {"new_version": 5})
    assert status == 400 and "new_version" in reply["message"]


def test_an_update_from_disk_in_mid_generation(
    server: Server, crowd: Crowd, model_b: Path, reference_a: Reference, reference_b: Reference
) -> None:
    """Tokens before the change are of A, tokens after it of B over the whole prefix, fed anew."""
    future = crowd.start()
    reply = server.post(
        "/update_weights_from_disk", {"model_path": str(model_b), "weight_version": "7"}
    )
    assert reply["success"] and reply["num_paused_requests"] == SLOTS
    _, replies = future.result()
    mixed = [(i, r) for i, r in enumerate(replies) if len(spans_of(r)) == 2]
    assert len(mixed) >= SLOTS // 2
    for i, reply in mixed[:5]:
        (_, _, border), last = spans_of(reply)
        assert last == ("7", border, long_of(i)) and reply["meta_info"]["weight_version"] == "7"
        tokens = [3 + i % 20, 5, 7, *reply["output_ids"]]
        expected = torch.cat(
            [
                reference_a.logprobs(tokens)[2 : 2 + border],
                reference_b.logprobs(tokens)[2 + border :],
            ]
        )
        torch.testing.assert_close(output_logprobs(reply), expected, atol=1e-5, rtol=0)


def test_a_bad_folder_leaves_the_weights_alone(
    server: Server, tmp_path: Path, reference_a: Reference
) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        status, reply = server.call("POST", "/update_weights_from_disk", {"model_path": str(path)})
        assert status == 400 and reply["success"] is False and str(path) in reply["message"]
    reply = server.generate([4, 5], new=10)
    expected = reference_a.logprobs([4, 5, *reply["output_ids"]])[1:]
    torch.testing.assert_close(output_logprobs(reply), expected, atol=1e-5, rtol=0)
    assert server.get("/model_info")["weight_version"] == "0"


class Sender:
    """The trainer's end: a group with the server and the weights of a folder."""

    def __init__(self, server: Server, folder: Path, timeout_s: float | None = 20.0) -> None:
        """`timeout_s`: the embedded server's own field; None leaves it out."""
        self.control = ServerControl(server.url, server.key)
        self.weights = load_file(folder / "model.safetensors")
        self.store, port = create_store("127.0.0.1", timeout_s=20)
        self.join: dict[str, Any] = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": "test",
            "backend": "gloo",
        }
        if timeout_s is not None:
            self.join["timeout_s"] = timeout_s

    def __enter__(self) -> "Sender":
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self.control.control, "join_group", self.join, 20)
            self.group = join_group(
                self.store, rank=0, world_size=2, group_name="test", backend="gloo", timeout_s=20
            )
            joined.result()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ServerError):  # closed by a failure
            self.control.control("leave_group", {"group_name": "test"}, 10)
        leave_group(self.group)

    def send(self, bucket: list[tuple[str, torch.Tensor]], *, flat: bool = True) -> None:
        specs = specs_of(bucket)
        payload = {
            "names": [s.name for s in specs],
            "dtypes": [s.dtype for s in specs],
            "shapes": [list(s.shape) for s in specs],
            "group_name": "test",
            "load_format": "flattened_bucket" if flat else None,
        }
        tensors = [flatten(bucket)] if flat else [t.contiguous() for _, t in bucket]
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self.control.control, "receive", payload, 20)
            for work in [
                dist.broadcast(t, group=self.group, group_src=0, async_op=True) for t in tensors
            ]:
                work.wait()
            received.result()


@pytest.mark.parametrize(("flat", "paused"), [(True, True), (False, True), (True, False)])
def test_an_update_over_a_group_in_mid_generation(
    server: Server, crowd: Crowd, model_b: Path, reference_b: Reference, flat: bool, paused: bool
) -> None:
    """With a pause by retraction, as a weight push has it, or none: an open update will do."""
    future = crowd.start()
    with Sender(server, model_b) as sender:
        control = sender.control.control
        control("begin", {}, 20) if paused else server.post("/begin_weight_update")
        before = server.get("/server_info")
        for bucket in bucketize(sender.weights.items(), 50_000):
            sender.send(bucket, flat=flat)
        digests = control("digest", {}, 20)["digests"]
        after = server.get("/server_info")
        assert (after["steps"], after["weight_version"]) == (before["steps"], "0")
        if paused:
            control("commit", {"version": 12}, 20)
        else:
            server.post("/end_weight_update", {"weight_version": "12"})
    assert digests == {name: digest(t) for name, t in sender.weights.items()}
    _, replies = future.result()
    assert {version for reply in replies for version, _, _ in spans_of(reply)} == {"0", "12"}
    mixed = [(i, r) for i, r in enumerate(replies) if len(spans_of(r)) == 2]
    for i, reply in mixed[:3]:
        border = spans_of(reply)[1][1]
        tokens = [3 + i % 20, 5, 7, *reply["output_ids"]]
        expected = reference_b.logprobs(tokens)[2 + border :]
        got = output_logprobs(reply)[border:]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    checksum = server.post("/weights_checker", {"action": "checksum"})
    assert checksum["ranks"][0]["checksums"] == digests


def test_an_incomplete_update_makes_the_server_unusable_until_a_whole_one(
    server: Server, crowd: Crowd, model_b: Path
) -> None:
    future = crowd.start()
    with Sender(server, model_b) as sender:
        buckets = list(bucketize(sender.weights.items(), 10**9))
        sender.control.control("begin", {}, 20)
        sender.send(buckets[0][3:])
        with pytest.raises(ServerError, match=r"3 of .* were not received"):
            sender.control.control("commit", {"version": 3}, 20)
        assert future.result()[0] == 503
        status, reply = server.call("POST", "/generate", {"input_ids": [3]})
        assert status == 400  # the body is looked at first
        body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}
        status, reply = server.call("POST", "/generate", body)
        assert status == 503 and "were not received" in reply["error"]["message"]
        assert server.call("GET", "/health")[0] == 503
        assert server.call("GET", "/health_generate")[0] == 503
        assert server.get("/model_info")["weight_version"] == "0"
        sender.control.control("begin", {}, 20)
        sender.send(buckets[0])
        sender.control.control("commit", {"version": 4}, 20)
    assert server.call("POST", "/generate", body)[0] == 200
    assert server.get("/model_info")["weight_version"] == "4"


def test_what_does_not_fit_is_refused_before_it_is_sent(server: Server, model_b: Path) -> None:
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    good = {"names": [name], "dtypes": ["float32"], "shapes": [[64, 40]], "group_name": "test"}
    control = ServerControl(server.url, server.key)
    with pytest.raises(ServerError, match="no weight update is open"):
        control.control("receive", good, 10)
    with pytest.raises(ServerError, match="no weight update is open"):
        control.control("commit", {"version": 1}, 10)
    control.control("begin", {}, 10)
    with pytest.raises(ServerError, match="joined: none"):
        control.control("receive", good, 10)
    with Sender(server, model_b) as sender:
        for changes, message in (
            ({"names": ["model.nothing"]}, "model.nothing is not a weight"),
            ({"shapes": [[40, 64]]}, r"found \(\(40, 64\), 'float32'\)"),
            ({"dtypes": ["bfloat16"]}, r"accepted: \(\(64, 40\), 'float32'\)"),
            ({"dtypes": ["system"]}, "found"),
            ({"shapes": [[-1]]}, "shapes"),
            ({"dtypes": []}, "dtypes"),
        ):
            with pytest.raises(ServerError, match=message):
                sender.control.control("receive", good | changes, 10)
    status, reply = server.call("POST", "/continue_generation", {})
    assert status == 400 and "update is open" in reply["message"]
    # Every refusal inside an update has made the server unusable: a load from disk heals it.
    server.post("/update_weights_from_disk", {"model_path": str(server.model)})
    server.post("/continue_generation")
    assert server.generate([3], new=2)["output_ids"]


def test_a_group_that_nobody_else_joins_fails_in_bounded_time(server: Server) -> None:
    store, port = create_store("127.0.0.1", timeout_s=20)
    body = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "lonely",
        "backend": "gloo",
        "timeout_s": 1,
    }
    start = time.monotonic()
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.call("POST", "/init_weights_update_group", body))
    )
    thread.start()
    assert server.generate([3], new=3)["output_ids"]  # meanwhile it serves
    thread.join()
    status, reply = answers[0]
    assert status == 400 and "lonely" in reply["message"]
    assert time.monotonic() - start < 15
    del store


def test_a_sender_that_never_sends_is_given_up_at_the_deadline(
    server: Server, model_b: Path
) -> None:
    with Sender(server, model_b, timeout_s=1.0) as sender:
        sender.control.control("begin", {}, 20)
        spec = specs_of(list(sender.weights.items())[:1])[0]
        payload = {
            "names": [spec.name],
            "dtypes": [spec.dtype],
            "shapes": [list(spec.shape)],
            "group_name": "test",
        }
        start = time.monotonic()
        with pytest.raises(ServerError, match=r"did not arrive within 1 s, the group is closed"):
            sender.control.control("receive", payload, 20)
        assert time.monotonic() - start < 10
        assert server.call("GET", "/health")[0] == 503
        with pytest.raises(ServerError, match="joined: none"):
            sender.control.control("receive", payload, 20)
