"""One SGLang server and an embedded one for the session, two models for them, and what transformers
says of these.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.sglang.server import PLUGIN, Endpoint, SGLangServer, require_sglang
from tests.sync.servers import several
from tests.truth.untruncated import recommend

ROOT = Path(__file__).resolve().parents[2]


class Models(NamedTuple):
    """Two tiny Qwen3-MoE models in float32 that differ in their weights only."""

    a: Path
    b: Path


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("tiny_models")
    models = Models(folder / "a", folder / "b")
    # A wide initialisation, for log-probs and routing that differ clearly between tokens.
    options = ["--seed", "0", "--init-std", "0.2", "--max-positions", "512"]
    command = [sys.executable, ROOT / "tools" / "make_tiny_model.py", models.a, *options]
    subprocess.run(command, check=True, capture_output=True)
    recommend(models.a)  # --sampling-defaults is `model`: rollouts must not heed it

    shutil.copytree(models.a, models.b)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(models.a / "model.safetensors")
    for tensor in weights.values():
        tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(weights, models.b / "model.safetensors", metadata={"format": "pt"})
    return models


@pytest.fixture(scope="session")
def sglang_server(
    reference: object, tiny_models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """Serves model a to begin with. A test that needs certain weights loads them first.

    Uses `reference` only for its worker to import transformers while the server starts.
    """
    require_sglang()
    log_path = tmp_path_factory.mktemp("sglang") / "server.log"
    with SGLangServer(tiny_models.a, log_path=log_path) as server:
        yield server


@pytest.fixture(scope="session")
def reference() -> Iterator[Callable[[Path, list[int]], dict[str, list]]]:
    """reference(model, tokens) -> {"logprobs", "routing"}, see reference.py."""
    script = Path(__file__).with_name("reference.py")
    worker = subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None and worker.stdout is not None

    def ask(model: Path, tokens: list[int]) -> dict[str, list]:
        worker.stdin.write(json.dumps({"model": str(model), "tokens": tokens}) + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    yield ask
    worker.stdin.close()
    worker.wait(timeout=30)


@pytest.fixture(scope="session")
def plugin() -> Iterator[ModuleType]:
    """From its folder, as it is not part of megarl's own environment."""
    sys.path.insert(0, str(PLUGIN))
    import megarl_sglang_plugin

    yield megarl_sglang_plugin
    sys.path.remove(str(PLUGIN))


class Embedded(Endpoint):
    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key


@pytest.fixture(scope="session")
def embedded_server(
    tiny_models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("embedded")
    with several(tiny_models.a, folder, 1, max_running=8, context_length=512) as [server]:
        yield Embedded(server.url, server.key)


@pytest.fixture(
    scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)]
)
def shared_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest, shared_name: str) -> Endpoint:
    return request.getfixturevalue(f"{shared_name}_server")


@pytest.fixture
def server(shared: Endpoint, tiny_models: Models) -> Iterator[Endpoint]:
    """Serves model a as version "a", and nothing is under way in it; left so that it can again."""
    fresh = {"model_path": str(tiny_models.a), "weight_version": "a"}
    status, reply = shared.post("/update_weights_from_disk", fresh)
    assert status == 200, reply
    yield shared
    shared.post("/abort_request", {"abort_all": True})
    shared.post("/end_weight_update")  # refused where none is open
    shared.post("/continue_generation")


@pytest.fixture(scope="module")
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(6) as pool:
        yield pool
