"""The bench of conversion: what it times runs, in processes of their own."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.helpers.families import save_model
from tests.helpers.tools import tool


def test_both_ways_are_measured(tmp_path: Path) -> None:
    hf = save_model("qwen3_moe yarn", tmp_path / "hf", torch.bfloat16)
    bench = tool("bench_convert")
    for name, source in (("import", hf), ("export", tmp_path / "import")):
        found = bench.in_a_process(name, source, tmp_path / name, 2)
        assert found["seconds"] > 0 and found["peak_bytes"] > 0
    back, first = (path / "model.safetensors" for path in (tmp_path / "export", hf))
    assert back.stat().st_size > 0.9 * first.stat().st_size


def test_of_all_rounds_the_shortest_time_and_the_highest_peak_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = tool("bench_convert")
    rounds = iter([(3.0, 10), (2.0, 30), (4.0, 20)])
    monkeypatch.setattr(bench, "WORK", {"import": (None, "source")})
    monkeypatch.setattr(bench, "generate", lambda *_: None)
    monkeypatch.setattr(
        bench,
        "in_a_process",
        lambda *_: dict(zip(("seconds", "peak_bytes"), next(rounds), strict=True)),
    )
    monkeypatch.setattr(bench, "results", lambda folder, best: best)
    found = bench.run(tmp_path, Namespace(gigabytes=1, rounds=3, threads=1))
    assert found == {"import": {"seconds": 2.0, "peak_bytes": 30}}
