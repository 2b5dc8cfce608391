"""What only the real SGLang has: its own checksums, and our plugin's record of an update. What the
embedded server has in common with it is in test_contract*.py.

Each test that depends on the weights being served loads them first: the server is shared.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.sglang.protocol import (
    digests,
    joined_group,
    ok,
    received,
    send,
)
from tests.sglang.server import SGLangServer

# The first test of a session may have to install SGLang, and waits for the server to start.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


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


def test_an_update_needs_a_begin_which_empties_the_record(sglang_server):
    tensors = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    body = {**tensors, "group_name": "weights", "load_format": "flattened_bucket"}
    status, reply = sglang_server.post("/update_weights_from_distributed", body)
    assert status == 400 and "begin_weight_update" in reply["message"]

    ok(sglang_server, "/begin_weight_update")
    assert received(sglang_server)[0] == {}
    ok(sglang_server, "/end_weight_update")
