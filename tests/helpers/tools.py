"""Programs of tools/ in the process of a test."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def tool(name: str) -> Any:
    """The module ``tools/NAME.py``, which must not import Megatron."""
    path = Path(__file__).parents[2] / "tools" / f"{name}.py"
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
