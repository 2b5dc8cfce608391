"""Models without experts to real SGLang servers, by every way: one in every precision, and one that
SGLang loads wrongly.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model, wide
from tests.helpers.tools import tool
from tests.sglang.conftest import Models
from tests.sglang.server import SGLangServer, require_sglang
from tests.sglang.test_push import described, push
from tests.sglang.test_push_matrix import serving
from tests.sync.matrix import Pair, make_pair, push_each_way

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]

# Codes and scales of a rank are whole blocks, also of keys and values.
ROOM = {"max_position_embeddings": 512, "num_key_value_heads": 4}
SERVED = [("fp32", 2), ("bf16", 1), ("fp8 f32", 1), ("fp8 power_of_two", 2)]


@pytest.fixture(scope="module", params=SERVED, ids=str)
def served(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pair, dict[str, Any]]]:
    precision, ranks = request.param
    folder = tmp_path_factory.mktemp("dense")
    source = save_model("qwen3", folder / "source", **{**wide("qwen3"), **ROOM})
    pair = make_pair(precision, folder, source)
    with serving(pair, ranks, folder / "server.log", routed=False) as server:
        yield pair, server


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_every_way_of_a_model_without_experts(
    pool: WorkerPool,
    served: tuple[Pair, dict[str, Any]],
    layout: dict[str, int],
    tmp_path: Path,
    record_property: Any,
) -> None:
    pair, server = served
    push_each_way(pool, pair, layout, "sglang", server, tmp_path, record_property)


def test_sglang_whose_loader_passes_over_scales_gets_no_codes(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """It starts from such a folder without a word, and computes with scales that are none."""
    require_sglang()
    source = save_model("llama biases tied", tmp_path / "source", **{**wide("llama"), **ROOM})
    fp8, folder = tmp_path / "fp8", tmp_path / "weights"
    tool("quantize_hf_fp8").quantize(source, fp8, "f32", [])
    folder.mkdir()
    (folder / "served").symlink_to(fp8)
    ways: list[dict[str, Any]] = [{}, {"handles": True}, {"folder": folder}]
    with SGLangServer(fp8, log_path=tmp_path / "server.log", routed=False) as server:
        for way in ways:
            [done] = push(pool, Models(fp8, fp8), [described(server)], [0], **way)
            assert set(done.lost) == {"sglang"}, way
            assert "no place for" in done.lost["sglang"], (way, done.lost)
            assert "_proj.weight_scale_inv" in done.lost["sglang"], (way, done.lost)
