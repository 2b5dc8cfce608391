"""Whether Transformer Engine can be imported, asked for the reason.

``import transformer_engine`` succeeds where its part for torch does not load (another torch,
another CUDA, a damaged file), and Megatron takes an ImportError on the way for absence. Loading
that part by itself tells why.
"""

import functools
import importlib


@functools.cache
def import_fault() -> str | None:
    """The first error that loading its torch part raises, None where it loads."""
    try:
        common = importlib.import_module("transformer_engine.common")
        importlib.import_module("transformer_engine.pytorch")
    except Exception as e:  # whatever a damaged installation raises
        return f"{type(e).__name__}: {e}"
    return None if hasattr(common, "load_framework_extension") else "another package of that name"
