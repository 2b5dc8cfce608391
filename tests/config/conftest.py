"""Files of tests of configurations."""

import json
from pathlib import Path

import pytest

from tests.config.cases import MOE


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with everything a run of any mode reads."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MOE))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_text("x")
    for name in ("prompts", "heldout", "demonstrations"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    (tmp_path / "rollouts").mkdir()
    for step in range(1, 11):
        (tmp_path / "rollouts" / f"step_{step}.npz").write_text("x")
    (tmp_path / "checkpoint" / "megatron").mkdir(parents=True)
    (tmp_path / "key").write_text("secret")
    (tmp_path / "old_run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path
