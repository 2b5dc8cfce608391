"""tools/push_table.py: a cell has what passed in it, and nothing else."""

import sys
from pathlib import Path

import pytest

from tests.helpers.tools import tool

SUITE = """\
import pytest

@pytest.mark.parametrize("server, layout, fails", [
    ("embedded", "1", None), ("embedded", "TP2", "disk"), ("sglang TP2", "1", "handles"),
])
def test_push(server, layout, fails, record_property):
    record_property("cell", f"{server}|bf16|{layout}")
    for way in ("handles", "disk"):
        assert way != fails
        record_property("push", f"{server}|bf16|{layout}|{way}")
        record_property("other", "of no interest")
"""


def test_cells_say_what_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = tmp_path / "test_some_pushes.py"
    suite.write_text(SUITE)
    table = tool("push_table")
    monkeypatch.setattr(table, "SUITES", {"embedded": str(suite)})
    monkeypatch.setattr(sys, "argv", ["push_table", "-p", "no:cacheprovider", "--rootdir", "."])
    assert table.main() == 1  # pytest's own
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith(("|", "all"))] == [
        "| servers | precision | 1 | TP2 |",
        "|---|---|---|---|",
        "| embedded | bf16 | all | handles |",
        "| sglang TP2 | bf16 | - | - |",
        "all: disk, handles",
    ]
    assert "| embedded | bf16 | - |" in table.table({("embedded", "bf16"): {"1": []}})
