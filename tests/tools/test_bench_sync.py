"""A tiny measurement of weight pushes, and whether its numbers agree with each other."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = "--hidden 64 --layers 2 --heads 4 --kv-heads 2 --head-dim 16 --experts 8 --topk 2"
TINY += " --moe-ffn 32 --vocab 256 --bucket-mb 0.0625 --repeats 1"


@pytest.mark.dist
def test_a_tiny_measurement_tells_what_it_is_to_tell(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "tools/bench_sync.py"), *TINY.split()]
    command += [
        "--layout",
        "pp=2",
        "--servers",
        "2",
        "--json",
        str(file),
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(file.read_text())

    # Two layers: attention 2 x 64 x 64 + 2 x 64 x 32 and norms of 2 x 64 + 2 x 16, a router 8 x 64,
    # 8 experts of 3 x 64 x 32; a norm of 64 and two tables of 256 x 64. In bf16.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64 + 2 * 16 + 8 * 64 + 8 * 3 * 64 * 32
    assert found["bytes"] == 2 * (2 * layer + 64 + 2 * 256 * 64)
    assert sum(found["bytes_by_sender"]) == found["bytes"]
    assert min(found["bytes_by_sender"]) > 0.4 * found["bytes"]
    assert found["fewest_calls"] <= found["calls"] <= 2 * found["fewest_calls"]
    assert 0 < found["verify_share"] <= found["verify_share_with_copies"] < 1
    assert 0 < found["copy_seconds"] < found["median_seconds"]["floor"]
    median = found["median_seconds"]
    assert found["stall_seconds"] <= median["push"]
    assert found["vs_raw_broadcast"] == median["floor"] / median["push"]
    assert "vs_raw_broadcast" in done.stdout
