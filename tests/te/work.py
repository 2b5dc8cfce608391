"""``actions.py`` with Transformer Engine: its functions by the name of this module are for workers
of ``te_pool``.
"""

import tests.te.shim  # isort: skip  # noqa: F401  first of all

from tests.te.actions import (
    exported,
    loaded,
    modules,
    parameters,
    passed_through_fused_adam,
    saved,
)

__all__ = ["exported", "loaded", "modules", "parameters", "passed_through_fused_adam", "saved"]
