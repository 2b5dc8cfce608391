import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megarl import cli
from tests.helpers.dist import WorkerPool
from tests.helpers.required import (  # noqa: F401 (hooks)
    pytest_configure,
    pytest_runtest_makereport,
)
from tests.helpers.workers import (  # noqa: F401 (hooks)
    pytest_collection_modifyitems,
    pytest_xdist_make_scheduler,
)

# As in every process of a run, and for those that tests start: more threads than cores wait for
# each other, and sums in another order are other bits.
os.environ["OMP_NUM_THREADS"] = "1"
# A shell starts what it runs in the background with SIGINT ignored, and so would all that we start.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent

Megarl = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE with weights large enough to make its distribution far from uniform."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "--init-std", "0.1")


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's problems: prompts.jsonl, heldout.jsonl, warmup.jsonl."""
    out = tmp_path_factory.mktemp("problems") / "data"
    tool = str(ROOT / "tools" / "make_demo_data.py")
    subprocess.run([sys.executable, tool, str(out)], check=True, timeout=120)
    return out


def make_tiny_model(out: Path, *arguments: str) -> Path:
    tool = str(ROOT / "tools" / "make_tiny_model.py")
    subprocess.run([sys.executable, tool, str(out), *arguments], check=True, timeout=120)
    return out


@pytest.fixture
def megarl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Megarl:
    """``megarl("config", "check", ...) -> (exit code, stdout, stderr)``"""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["megarl", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(bool(e.code))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
