"""Every transport and precision from every layout to real SGLang servers of one and of two ranks.
Each push is the first of its trainer, so that the server proves itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist import WorkerPool
from tests.sglang.server import SGLangServer, require_sglang
from tests.sglang.test_push import described
from tests.sync.matrix import LAYOUTS, PRECISIONS, Pair, make_pair, push_each_way, slow_but_one

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.dist,
    pytest.mark.timeout(1500),
]

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@pytest.fixture(scope="module", params=slow_but_one(PRECISIONS))
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("pair"))


@contextmanager
def serving(pair: Pair, ranks: int, log: Path, routed: bool = True) -> Iterator[dict[str, Any]]:
    """The old weights, with ``ranks`` of tensor parallelism."""
    require_sglang()
    two = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    server = SGLangServer(
        pair.old.served,
        log_path=log,
        dtype=DTYPES[pair.dtype],
        extra_args=("--tp-size", str(ranks)),
        env=two if ranks == 2 else None,
        routed=routed,
    )
    with server:
        yield {**described(server), "ranks": ranks}


@pytest.fixture(scope="module", params=slow_but_one([1, 2]), ids=["tp1", "tp2"])
def server(
    request: Any, pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    with serving(pair, request.param, log) as server:
        yield server


@pytest.mark.parametrize("layout", slow_but_one(LAYOUTS), ids=str)
def test_every_way_from_every_layout(
    pool: WorkerPool,
    pair: Pair,
    server: dict[str, Any],
    layout: dict[str, int],
    tmp_path: Path,
    record_property: Any,
) -> None:
    push_each_way(pool, pair, layout, "sglang", server, tmp_path, record_property)
