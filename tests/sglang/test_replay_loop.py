"""R3 in bf16 from the real SGLang's routing to the trainer's metrics."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs, Launch, launch  # noqa: F401 (a fixture)
from tests.sglang.conftest import Models
from tests.sglang.server import SGLangServer, require_sglang
from tests.truth import replayed

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_replayed_routing_brings_log_probs_nearer_and_others_take_them_away(
    launch: Callable[..., Launch],  # noqa: F811
    tiny_models: Models,
    demo_data: Path,
    tmp_path: Path,
) -> None:
    require_sglang()
    inputs = Inputs(tiny_models.a, Path("null"), demo_data)
    log = tmp_path / "server.log"
    with SGLangServer(tiny_models.a, log_path=log, dtype="bfloat16") as server:
        key = tmp_path / "key"
        key.write_text(server.key)
        key.chmod(0o600)
        engine = ("rollout.engine=sglang", f"rollout.urls=[{server.url}]")
        replayed.check(launch, inputs, tmp_path, *engine, f"rollout.key_file={key}")
