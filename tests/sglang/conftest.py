"""One SGLang server for the session, two models for it, and what transformers says of them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.sglang.server import SGLangServer, require_sglang
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
