"""tools/quantize_hf_fp8.py, run in the process of the tests."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.families import save_model, wide
from tests.helpers.tools import tool

Quantize = Callable[..., str | None]


@pytest.fixture
def quantize(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Quantize:
    """Run the tool here; what it refused, or None."""
    module = tool("quantize_hf_fp8")

    def run(*arguments: object) -> str | None:
        monkeypatch.setattr(sys, "argv", ["quantize_hf_fp8", *map(str, arguments)])
        capsys.readouterr()
        before = signal.getsignal(signal.SIGTERM)
        try:
            code = module.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        said = capsys.readouterr().err
        assert bool(code) == bool(said)
        return said or None

    return run


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe") / "model"
    return save_model("qwen3_moe yarn", folder, torch.bfloat16, **wide("qwen3_moe yarn"))
