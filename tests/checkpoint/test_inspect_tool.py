"""``tools/inspect_checkpoint.py``: what it prints, and its exit code."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.inspect import describe
from megarl.checkpoint.workers import Workers
from megarl.convert import Import
from tests.helpers.families import save_model

ROOT = Path(__file__).parents[2]
EXPERTS = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    hf = save_model("qwen3_moe tied", folder / "hf", torch.bfloat16)
    Import(hf).run(folder / "checkpoint", Workers())
    return folder / "checkpoint"


@pytest.fixture
def other(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "other"))


def another_vocabulary(checkpoint: Path) -> None:
    path = checkpoint / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab": 70}))


Tool = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    path = ROOT / "tools" / "inspect_checkpoint.py"
    spec = importlib.util.spec_from_file_location("inspect_checkpoint", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_checkpoint", *map(str, arguments)])
        code = module.main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_the_tool_prints_lines_with_tabs(tool: Tool, sound: Path) -> None:
    code, out, _ = tool(sound)
    lines = out.splitlines()
    assert code == 0 and lines[0] == str(sound)
    assert "\t".join([EXPERTS, "[8, 40, 32]", "bfloat16", "16", "[8, 2, 1]", "20480"]) in lines
    assert any(line.startswith("model.norm.weight\t") for line in lines)
    assert 'model.family: "qwen3_moe"' in lines


def test_the_tool_draws_tables_on_a_terminal(
    tool: Tool, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are whole, and brackets are no markup."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = tool(sound)
    lines = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    assert code == 0
    assert ["", EXPERTS, "[8, 40, 32]", "bfloat16", "16", "[8, 2, 1]", "20480", ""] in lines


def test_the_tool_says_by_its_exit_code_what_it_found(tool: Tool, sound: Path, other: Path) -> None:
    assert tool(sound, "--check")[:2] == (0, "faults: 0\n")
    assert tool(sound, "--compare", other)[:2] == (0, "differences: 0\n")
    another_vocabulary(other)
    code, out, _ = tool(other, "--check")
    assert code == 1 and out.startswith("faults: 1\n") and "found [64, 32]" in out
    code, out, _ = tool(other, "--compare", sound)
    assert (code, out) == (1, "differences: 1\nmodel.json: vocab: 70, 30\n")
    code, _, err = tool(sound / "nothing")
    assert code == 1 and err.startswith("inspect_checkpoint: ") and "is no checkpoint" in err


def test_the_tools_json_has_everything(tool: Tool, sound: Path, other: Path) -> None:
    another_vocabulary(other)
    code, out, _ = tool(other, "--json", "--check", "--compare", sound)
    found = json.loads(out)
    assert code == 1
    assert len(found["faults"]) == 1 and found["differences"] == ["model.json: vocab: 70, 30"]
    assert {k: v for k, v in found.items() if k not in ("faults", "differences")} == json.loads(
        json.dumps(describe(other))
    )
