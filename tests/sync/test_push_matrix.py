"""Every transport and precision from every layout to an embedded server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dist import WorkerPool
from tests.sync.matrix import LAYOUTS, PRECISIONS, Pair, make_pair, push_each_way, slow_but_one
from tests.sync.servers import Server, several

pytestmark = [pytest.mark.dist]


@pytest.fixture(scope="module", params=slow_but_one(PRECISIONS))
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def server(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    run = tmp_path_factory.mktemp("run")
    with several(pair.old.served, run, 1, dtype=pair.dtype) as [server]:
        yield server


@pytest.mark.parametrize("layout", slow_but_one(LAYOUTS), ids=str)
def test_every_way_from_every_layout(
    pool: WorkerPool,
    pair: Pair,
    server: Server,
    layout: dict[str, int],
    tmp_path: Path,
    record_property: Any,
) -> None:
    push_each_way(pool, pair, layout, "embedded", server.described, tmp_path, record_property)
