"""Why Qwen3-Next is refused (docs/model-families.md). When this fails, upstream can do more than
it says there.
"""

import pytest

from megarl.models.spec import FAMILIES, REFUSED
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist


def test_upstreams_gated_delta_net_cannot_compute_packed_rows_here(pool: WorkerPool) -> None:
    (found,) = pool.run("tests.actor.work_gated_delta_net:complaints", world=1)
    assert "ImportError: FLA is not installed" in found["built"]
    assert "Packed sequence does not support deterministic mode" in found["packed"]
    assert found["alone"] == "TypeError: 'NoneType' object is not callable"  # FLA's l2norm
    assert "cu_seqlens is not supported for torch_chunk_gated_delta_rule" in found["kernel"]
    assert "qwen3_next" in REFUSED and not set(REFUSED) & set(FAMILIES)
