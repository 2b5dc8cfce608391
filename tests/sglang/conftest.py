"""One SGLang server for the session, two models for it, and what transformers says of them."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.sglang.server import SGLangServer, require_sglang

ROOT = Path(__file__).resolve().parents[2]


class Models(NamedTuple):
    """Two tiny Qwen3-MoE models in float32 that differ in their weights only."""

    a: Path
    b: Path


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("tiny_models")
    for seed, name in enumerate(Models._fields):
        command = [sys.executable, ROOT / "tools" / "make_tiny_model.py", folder / name]
        # A wide initialisation, for log-probs and routing that differ clearly between tokens.
        options = ["--seed", str(seed), "--init-std", "0.2", "--max-positions", "512"]
        subprocess.run([*command, *options], check=True, capture_output=True)
    return Models(folder / "a", folder / "b")


@pytest.fixture(scope="session")
def sglang_server(
    tiny_models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """Serves model a. A test that needs certain weights loads them first, see `serve`."""
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
