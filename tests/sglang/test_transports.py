"""Pushes to a real SGLang server by the ways that are not process groups: handles of shared memory,
and folders.
"""

import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megarl.errors import ServerError
from megarl.rollout.control import ServerControl
from tests.helpers.dist import WorkerPool
from tests.sglang.conftest import Models
from tests.sglang.contract import LONG, TOLERANCE, Reference, logprobs_of, running, spans_of
from tests.sglang.protocol import PROMPT, generate, ok, prompt_logprobs
from tests.sglang.server import SGLangServer, require_sglang
from tests.sglang.test_push import described, push, serves
from tests.sync.servers import Proxy, Server, proxied

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.timeout(1500)]

SMALL = {"max_bytes": 100_000}  # several buckets


@pytest.fixture
def folder(tiny_models: Models, tmp_path: Path) -> Path:
    """That versions are published in."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "served").symlink_to(tiny_models.a)
    return folder


@pytest.fixture(params=["handles", "disk"])
def way(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    return {"handles": True, **SMALL} if request.param == "handles" else {"folder": folder, **SMALL}


@pytest.fixture
def claiming(sglang_server: SGLangServer) -> Iterator[Proxy]:
    """The server, as if it were started with a memory saver, which works on GPUs alone."""
    real = Server("sglang", sglang_server.url, sglang_server.key, 0, multiprocessing.Process())

    def saver(status: int, reply: Any) -> tuple[int, Any]:
        assert reply["enable_memory_saver"] is False
        return status, {**reply, "enable_memory_saver": True}

    with proxied(real, "/server_info", saver, times=10**6) as proxy:
        yield proxy


def of_prompt(reference: Reference, model: Path) -> list[float]:
    return list(reference(model, PROMPT)["logprobs"])


def test_weights_arrive_and_are_what_it_computes_with(
    pool: WorkerPool,
    sglang_server: SGLangServer,
    tiny_models: Models,
    reference: Reference,
    way: dict[str, Any],
) -> None:
    """Twice, and a prompt whose keys it has cached is computed anew each time."""
    servers = [described(sglang_server)]
    for whom, model in (([0],), tiny_models.b), (([0], [0]), tiny_models.a):
        pushes = push(pool, tiny_models, servers, *whom, **way)
        assert [p.lost for p in pushes] == [{}] * len(whom)
        assert pushes[0].receipt is not None and pushes[0].receipt.calls > 3
        serves(sglang_server, model, 100 + len(whom))
        expected = of_prompt(reference, model)
        assert prompt_logprobs(sglang_server) == pytest.approx(expected, abs=TOLERANCE)


def test_requests_that_run_go_on_by_the_new_weights(
    pool: WorkerPool,
    sglang_server: SGLangServer,
    tiny_models: Models,
    reference: Reference,
    way: dict[str, Any],
) -> None:
    """Every token is of the version that it claims."""
    push(pool, tiny_models, [described(sglang_server)], [0], [0], **way)  # a, as 102
    with ThreadPoolExecutor(2) as background:
        future = running(sglang_server, background)
        push(pool, tiny_models, [described(sglang_server)], [0], **way)  # b, as 101
        reply = future.result(60)
    (old, _, border), (new, start, end) = spans_of(reply)
    assert (old, new, start, end) == ("102", "101", border, LONG) and border > 0
    found, tokens, at = logprobs_of(reply), PROMPT + reply["output_ids"], len(PROMPT) - 1
    for model, span in ((tiny_models.a, slice(0, border)), (tiny_models.b, slice(border, LONG))):
        expected = reference(model, tokens)["logprobs"][at:][span]
        assert found[span] == pytest.approx(expected, abs=TOLERANCE)


def test_a_server_without_a_memory_saver_is_not_asked_to_release(
    sglang_server: SGLangServer,
) -> None:
    """It would say yes, and keep everything."""
    before = prompt_logprobs(sglang_server)
    with pytest.raises(ServerError, match=r"rollout\.release_memory: .* --enable-memory-saver"):
        ServerControl(sglang_server.url, sglang_server.key).control("release", {}, 30)
    assert prompt_logprobs(sglang_server) == before  # it was not paused


def test_memory_is_released_and_resumed_in_an_order_that_its_scheduler_survives(
    sglang_server: SGLangServer, claiming: Proxy, tiny_models: Models, reference: Reference
) -> None:
    """On CPU nothing is gone meanwhile, but the scheduler keeps books of it all the same."""
    control = ServerControl(claiming.url, sglang_server.key, released=True)
    for model, version in ((tiny_models.b, 7), (tiny_models.a, 8)):
        generate(sglang_server, num_tokens=4)
        how = {"mode": "retract", "session": False}
        control.control("release", {}, 60)
        control.control("resume_memory", {}, 60)
        control.control("begin", how, 60)
        load = {"model_path": str(model), "flush_cache": False}
        control.control("load_path", load, 60)
        control.control("commit", {"version": version, **how}, 60)
        reply = generate(sglang_server, num_tokens=4)
        assert reply["meta_info"]["weight_version"] == str(version)
        expected = of_prompt(reference, model)
        assert prompt_logprobs(sglang_server) == pytest.approx(expected, abs=TOLERANCE)
    asked = [path for path in claiming.paths if "memory" in path]
    assert (
        asked
        == [
            "/release_memory_occupation",
            "/resume_memory_occupation",
            "/resume_memory_occupation",
        ]
        * 2
    )


# --- files that are not what was written ----------------------------------------------------------


def flipped(version: Path, old: Path) -> str:
    """One bit of one tensor is another one."""
    file = max(version.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    name = min(name for name in load_file(file) if name.endswith("_proj.weight"))
    raw = bytearray(file.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + size])[name]["data_offsets"]
    raw[8 + size + (begin + end) // 2] ^= 1
    file.write_bytes(raw)
    return name


def of_other_weights(version: Path, old: Path) -> str:
    """A whole file has the tensors of the version before."""
    file = min(version.glob("*.safetensors"))
    before = load_file(old / "model.safetensors")
    save_file({name: before[name] for name in load_file(file)}, file, metadata={"format": "pt"})
    return min(load_file(file))


@pytest.mark.parametrize("damage", [flipped, of_other_weights])
@pytest.mark.parametrize("nth", [0, 1], ids=["at once", "when it proves itself"])
def test_a_damaged_file_is_found_before_its_version_is_served(
    pool: WorkerPool,
    sglang_server: SGLangServer,
    tiny_models: Models,
    folder: Path,
    damage: Callable[[Path, Path], str],
    nth: int,
) -> None:
    ok(sglang_server, "/update_weights_from_disk", model_path=str(tiny_models.a))
    ok(sglang_server, "/update_weight_version", new_version="before")
    names, asked = [], itertools.count()

    def forge(body: dict[str, Any]) -> dict[str, Any]:
        if next(asked) == nth:
            names.append(damage(Path(body["model_path"]), tiny_models.a))
        return body

    real = Server("sglang", sglang_server.url, sglang_server.key, 0, multiprocessing.Process())
    with proxied(real, "/update_weights_from_disk", times=2, forge=forge) as proxy:
        about = {**described(sglang_server), "url": proxy.url}
        [bad] = push(pool, tiny_models, [about], [0], folder=folder, **SMALL)
        assert next(asked) == nth + 1
    assert set(bad.lost) == {"sglang"} and names[0] in bad.lost["sglang"], bad.lost
    status, about = sglang_server.request("GET", "/model_info", key=sglang_server.key)
    assert (status, about["weight_version"]) == (200, "before")
    [good] = push(pool, tiny_models, [described(sglang_server)], [0], folder=folder, **SMALL)
    assert good.lost == {}
    serves(sglang_server, tiny_models.b, 101)


@pytest.mark.slow
def test_every_rank_of_a_server_gets_whole_tensors(
    pool: WorkerPool, tiny_models: Models, reference: Reference, way: dict[str, Any], tmp_path: Path
) -> None:
    require_sglang()
    server = SGLangServer(
        tiny_models.a,
        log_path=tmp_path / "server.log",
        extra_args=("--tp-size", "2"),
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # compulsory: more ranks than NUMA nodes
    )
    with server:
        pushes = push(pool, tiny_models, [{**described(server), "ranks": 2}], [0], **way)
        assert pushes[0].lost == {}
        serves(server, tiny_models.b, 101)
        expected = of_prompt(reference, tiny_models.b)
        assert prompt_logprobs(server) == pytest.approx(expected, abs=TOLERANCE)
