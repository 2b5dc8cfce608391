"""Finds and loads the compiled extension `megarl/_C*.so`; says once, and why, when it is absent.

Without it every op runs its torch reference: the same values, slower. Two environment variables:
  MEGARL_REQUIRE_NATIVE=1  its absence is an ImportError (for clusters and CI)
  MEGARL_DISABLE_NATIVE=1  it is left alone (to run the references themselves)
"""

import logging
import os
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

BUILD_COMMAND = "pip install --no-deps -e ."

# torch's dispatch key for each device type that has a folder in csrc/.
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


@cache  # loads, and reports, once a process
def native_library() -> Path | None:
    """Load the extension if need be; its path, or None where the references are used instead."""
    if os.environ.get("MEGARL_DISABLE_NATIVE") == "1":
        _report("MEGARL_DISABLE_NATIVE=1 is set")
        return None
    package = Path(__file__).resolve().parent.parent
    path = next(iter(sorted(package.glob("_C*.so"))), None)
    if path is None:
        _report(f"there is no _C*.so in {package}: it was not built")
        return None
    try:
        torch.ops.load_library(path)
    except OSError as e:  # built for another machine, or a library it needs is gone
        _report(f"{path} does not load: {e}")
        return None
    return path


def native_devices(op: str) -> frozenset[str]:
    """Device types for which the loaded extension has a kernel of `op`."""
    path = native_library()
    if path is None:
        return frozenset()
    if not torch._C._dispatch_has_kernel(f"megarl::{op}"):
        # As quiet a loss of speed as no library at all, and after an update the likelier one.
        _report(f"{path} is older than its sources: it has no {op}")
        return frozenset()
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(d for d, key in _DISPATCH_KEYS.items() if has_kernel(f"megarl::{op}", key))


def _report(reason: str) -> None:
    message = (
        f"the compiled operators are not in use, the slower torch references are: {reason}. "
        f"To build them, run in the repository: {BUILD_COMMAND}"
    )
    if os.environ.get("MEGARL_REQUIRE_NATIVE") == "1":
        raise ImportError(f"MEGARL_REQUIRE_NATIVE=1, but {message}")
    log.warning(message)
