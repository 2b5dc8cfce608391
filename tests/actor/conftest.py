"""Models of actor tests."""

from pathlib import Path

import pytest

from tests.conftest import make_tiny_model


@pytest.fixture(scope="session")
def tiny_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the first without experts: where the model hardly matters."""
    out = tmp_path_factory.mktemp("small") / "model"
    sizes = ("--layers", "2", "--hidden", "32", "--heads", "2", "--head-dim", "16", "--ffn", "32")
    experts = ("--experts", "4", "--moe-ffn", "16", "--dense-layers", "0")
    return make_tiny_model(out, *sizes, *experts, "--init-std", "0.1")
