"""What a worker does in ``test_measure_delta.py``."""

import importlib.util
from pathlib import Path
from typing import Any


def measure(rank: int, arguments: list[str]) -> dict[str, Any]:
    from megatron.core import parallel_state

    path = Path(__file__).parents[2] / "tools" / "measure_delta.py"
    spec = importlib.util.spec_from_file_location("measure_delta", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    try:
        return dict(tool.main(arguments))
    finally:
        parallel_state.destroy_model_parallel()
