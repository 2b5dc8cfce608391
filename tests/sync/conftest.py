"""Several real servers, two sets of weights for them, and a trainer that pushes these."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import make_tiny_model
from tests.helpers.dist import WorkerPool
from tests.sync.pushing import Trainer
from tests.sync.servers import Server, several


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of the same shapes, 25 MB each: more than sockets hold."""
    folder = tmp_path_factory.mktemp("models")
    first = make_tiny_model(folder / "0", "--init-std", "0.1", "--moe-ffn", "1024")
    shutil.copytree(first, folder / "1")
    tensors = load_file(first / "model.safetensors")
    changed = {name: tensor * 1.01 + 0.001 for name, tensor in tensors.items()}
    assert not any(torch.equal(tensors[n], changed[n]) for n in tensors)
    save_file(changed, folder / "1" / "model.safetensors", metadata={"format": "pt"})
    return [first, folder / "1"]


@pytest.fixture
def servers(models: list[Path], tmp_path: Path) -> Iterator[list[Server]]:
    """Four; the last one is called like the second: it has taken its place."""
    with several(models[0], tmp_path / "run", 4) as servers:
        servers[3].name = servers[1].name
        yield servers


@pytest.fixture
def trainer(pool: WorkerPool, models: list[Path], servers: list[Server]) -> Trainer:
    return Trainer(pool, models, servers)
