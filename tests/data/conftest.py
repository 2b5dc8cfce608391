"""The demo's tokenizer, from the folder the tool writes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.data.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(tiny_model)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """A file of the given lines."""

    def write(*lines: str) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write
