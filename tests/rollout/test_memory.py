"""Memory that the embedded server gives back: gone, and nothing goes wrong without it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import ServerError
from megarl.rollout.control import ServerControl
from megarl.rollout.embedded import Engine
from megarl.rollout.embedded_memory import KV_CACHE, WEIGHTS, Memory, Released, own_memory
from tests.rollout.conftest import Server
from tests.rollout.test_engine import NoWeights, requests_for, slot_model
from tests.rollout.test_server_generate import wait_for

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
PROMPT = [3, 9, 4]


@pytest.fixture
def control(server: Server) -> Iterator[ServerControl]:
    yield ServerControl(server.url, server.key, released=True)
    server.call("POST", RESUME, {"tags": server.get("/server_info")["released"]})


def refused(server: Server, path: str, body: Any = None) -> str:
    status, reply = server.call("POST", path, body or {})
    assert status in (400, 503), (path, status, reply)
    text = reply.get("message") or reply["error"]["message"]
    return f"{status} {text}"


def ask(server: Server) -> tuple[list[int], list[Any]]:
    reply = server.generate(PROMPT, new=8, sampling={"sampling_seed": 5})
    return reply["output_ids"], reply["meta_info"]["output_token_logprobs"]


def test_a_server_that_gave_its_memory_back_answers_503_until_it_is_whole_again(
    server: Server, control: ServerControl
) -> None:
    """And then as before, to the last bit."""
    before = ask(server)
    generate = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8}}
    folder = {"model_path": str(server.model), "weight_version": "0"}
    control.control("release", {}, 30)
    assert server.get("/server_info")["released"] == ["kv_cache", "weights"]
    assert "503 its weights have been released" in refused(server, "/generate", generate)
    assert server.call("GET", "/health")[0] == server.call("GET", "/health_generate")[0] == 503
    for path, body in (
        ("/begin_weight_update", None),
        ("/update_weights_from_disk", folder),
        ("/weights_checker", {"action": "digest"}),
        ("/continue_generation", None),
    ):
        status, reply = server.call("POST", path, body or {})
        assert status in (400, 500) and "was released" in str(reply), (path, reply)
    assert server.call("POST", "/flush_cache")[0] == 200

    control.control("resume_memory", {}, 30)
    assert server.get("/server_info")["released"] == ["kv_cache"]
    assert "503 its weights have been released" in refused(server, "/generate", generate)
    server.post("/update_weights_from_disk", folder)
    assert "503 memory of kv_cache" in refused(server, "/generate", generate)
    assert "memory of kv_cache" in refused(server, "/continue_generation")
    server.post("/begin_weight_update")  # a push of no weights, which its end refuses
    with pytest.raises(ServerError, match="were not received"):
        control.control("commit", {"version": 0, "mode": "retract"}, 30)
    server.post("/update_weights_from_disk", folder)
    control.control("commit", {"version": 0, "mode": "retract", "session": False}, 30)
    assert server.get("/server_info")["released"] == []
    assert ask(server) == before


def test_what_is_needed_is_not_given_back_and_what_is_there_not_resumed(
    server: Server, control: ServerControl
) -> None:
    with ThreadPoolExecutor(1) as background:
        sampling = {"max_new_tokens": 60, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        future = background.submit(server.post, "/generate", body)
        wait_for(lambda: server.get("/server_info")["running"] == 1)
        assert "requests need the memory" in refused(server, RELEASE)
        assert len(future.result()["output_ids"]) == 60
    server.post("/begin_weight_update")
    assert "a weight update is open" in refused(server, RELEASE)
    server.call("POST", "/end_weight_update", {})
    server.post(
        "/update_weights_from_disk", {"model_path": str(server.model), "weight_version": "0"}
    )
    assert "found kv_cache, weights; released: []" in refused(server, RESUME)
    assert "tags: found" in refused(server, RELEASE, {"tags": ["cuda_graph"]})
    assert "tags: found" in refused(server, RELEASE, {"tags": [["weights"]]})
    server.post(RELEASE, {"tags": ["kv_cache"]})
    server.post(RELEASE, {"tags": ["kv_cache"]})
    assert "found weights; released: ['kv_cache']" in refused(server, RESUME, {"tags": []})
    server.post(RESUME, {"tags": ["kv_cache"]})
    assert len(ask(server)[0]) > 0


@pytest.mark.parametrize("fp8", ["none", "f32"])
def test_what_is_released_is_all_that_weights_and_cache_take(model_a: Path, fp8: str) -> None:
    engine = Engine(slot_model(model_a, fp8=fp8), NoWeights())
    engine.start()
    engine.submit(requests_for(engine, [PROMPT])).result(30)
    weights = [p.untyped_storage() for p in engine.model.module.parameters()]
    weights += [t.untyped_storage() for t in engine.model.tensors()]
    stores = engine.model.cache._keys, engine.model.cache._values
    assert all(s.nbytes() for s in weights) and all(stores)
    places = {s.data_ptr() for s in weights}
    assert (len(places) > len(list(engine.model.module.parameters()))) == (fp8 != "none")
    engine.release(frozenset({KV_CACHE, WEIGHTS})).result(30)
    assert not any(s.nbytes() for s in weights) and not any(stores)
    engine.stop()


def test_memory_goes_back_to_the_system() -> None:
    """Also where the allocator would keep it: pieces between others, of a size that it has had
    before.
    """

    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    size, memory = 2**20, Memory()
    torch.ones(30 * size, dtype=torch.uint8)
    pieces = [torch.ones(size, dtype=torch.uint8) for _ in range(65)]
    before = resident()
    memory.release(WEIGHTS, pieces[:-1])
    assert before - resident() > 0.9 * 64 * size


def test_tensors_keep_their_shapes_and_views_while_their_memory_is_gone() -> None:
    memory, base = Memory(), torch.arange(12.0)
    view, other = base[2:6].view(2, 2), torch.ones(3)
    memory.release(WEIGHTS, [view, base, other])
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    assert (base.shape, view.shape) == ((12,), (2, 2))
    with pytest.raises(Released, match="memory of weights was released"):
        memory.require(KV_CACHE, WEIGHTS)
    memory.require(KV_CACHE)
    memory.restore(frozenset({WEIGHTS}))
    base.copy_(torch.arange(12.0))
    assert view.tolist() == [[2, 3], [4, 5]] and other.untyped_storage().nbytes() == 12
    with pytest.raises(Released):
        memory.restore(frozenset({WEIGHTS}))


def test_parameters_in_a_mapped_file_get_memory_of_their_own(tmp_path: Any) -> None:
    file = tmp_path / "values"
    file.write_bytes(torch.arange(4.0).numpy().tobytes())
    module = torch.nn.Linear(2, 2, bias=False)
    storage = torch.UntypedStorage.from_file(str(file), shared=False, nbytes=16)
    mapped = torch.empty(0).set_(storage, 0, (2, 2), (2, 1))
    module.weight = torch.nn.Parameter(mapped, requires_grad=False)
    assert not module.weight.untyped_storage().resizable()
    own_memory(module)
    assert module.weight.tolist() == [[0, 1], [2, 3]]
    Memory().release(WEIGHTS, module.parameters())
    assert module.weight.untyped_storage().nbytes() == 0
