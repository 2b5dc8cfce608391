"""R3 in bf16 from the embedded server's routing to the trainer's metrics."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import make_tiny_model
from tests.e2e.conftest import Inputs, Launch, launch  # noqa: F401 (a fixture)
from tests.truth import replayed

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_replayed_routing_brings_log_probs_nearer_and_others_take_them_away(
    launch: Callable[..., Launch],  # noqa: F811
    demo_data: Path,
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", "--init-std", "0.2")
    inputs = Inputs(model, Path("null"), demo_data)
    replayed.check(launch, inputs, tmp_path)
