"""Models of actor tests."""

from pathlib import Path

import pytest

from megarl.data.recorded import recorded_path, write_samples
from tests.conftest import make_tiny_model
from tests.helpers.samples import random_samples


@pytest.fixture(scope="session")
def tiny_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the first without experts: where the model hardly matters."""
    out = tmp_path_factory.mktemp("small") / "model"
    sizes = ("--layers", "2", "--hidden", "32", "--heads", "2", "--head-dim", "16", "--ffn", "32")
    experts = ("--experts", "4", "--moe-ffn", "16", "--dense-layers", "0")
    return make_tiny_model(out, *sizes, *experts, "--init-std", "0.1")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of rollouts as a run records them: ragged, with holes, some groups all equal."""
    folder = tmp_path_factory.mktemp("rollouts")
    for step in (1, 2):
        write_samples(recorded_path(folder, step), random_samples(8, 4, seed=step))
    return folder


@pytest.fixture(scope="session")
def blocks_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Halves of its matrices are whole blocks of 128. A dense layer and one of experts."""
    sizes = ("--layers", "2", "--hidden", "256", "--heads", "2", "--kv-heads", "2")
    sizes += ("--head-dim", "128", "--ffn", "256")
    experts = ("--experts", "4", "--moe-ffn", "256", "--dense-layers", "0")
    return make_tiny_model(tmp_path_factory.mktemp("blocks") / "model", *sizes, *experts)
