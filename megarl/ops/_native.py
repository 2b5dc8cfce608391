"""Finds the compiled extensions, says which ops run them, and counts their calls.

`megarl/_C*.so` has the ops on tensors, `megarl/_host*.so` those on the host (csrc/host/).

`MEGARL_OPS` chooses:
  unset    the compiled op where there is one for the device; else its reference, said once with the
           reason
  native   as above, but a missing extension or kernel is an ImportError (for clusters and CI)
  torch    the references: the same values, slower
`MEGARL_LIBRARY` names a library to load instead of the package's (tools/verify_gpu.py, tests).
On CUDA a kernel is compared with its reference before it is first used (`_selfcheck.py`).
"""

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megarl.ops._selfcheck import checked_ops, verify

log = logging.getLogger(__name__)

BUILD_COMMAND = "pip install --no-deps -e ."
CHOICES = ("native", "torch")

# torch's dispatch key for each device type that has a folder in csrc/.
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}

_PACKAGE = Path(__file__).resolve().parent.parent
_NEEDED = "for which a C++ compiler is needed (g++ 9 or newer)"

HOST_OPS = ("pack_rows", "routing_codec")
"""Those of `megarl._host`: their references give the same results to the last bit."""

_calls: Counter[tuple[str, str]] = Counter()


def choice() -> str | None:
    """`MEGARL_OPS`. Raises ImportError for a value that is none of `CHOICES`."""
    value = os.environ.get("MEGARL_OPS") or None
    if value is not None and value not in CHOICES:
        raise ImportError(
            f"MEGARL_OPS={value!r}; accepted: {', '.join(CHOICES)}, or leave it unset"
        )
    return value


@cache  # loads, and reports, once a process
def native_library() -> Path | None:
    """Load the extension if need be; its path, or None where the references are used instead."""
    if choice() == "torch":
        log.info("MEGARL_OPS=torch: every op runs its torch reference")
        return None
    given = os.environ.get("MEGARL_LIBRARY")
    if given:
        torch.ops.load_library(given)  # asked for by name: there is no other to fall back on
        return Path(given)
    path = next(iter(sorted(_PACKAGE.glob("_C*.so"))), None)
    if path is None:
        _report(f"there is no _C*.so in {_PACKAGE}: it was not built, {_NEEDED}")
        return None
    try:
        torch.ops.load_library(path)
    except OSError as e:  # built for another machine, or a library it needs is gone
        _report(f"{path} does not load: {e}")
        return None
    return path


@cache
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


def runs_native(op: str, device: torch.device) -> bool:
    """Whether this call of `op` runs compiled on `device`; counts it. Raises NativeMismatch where a
    CUDA kernel is not what its reference is.
    """
    native = device.type in native_devices(op)
    if torch.compiler.is_compiling():
        return native
    if native and device.type != "cpu":
        verify(op, device, native_library())
    count_call(op, native)
    return native


def verify_all(device: torch.device) -> None:
    """Compare every kernel that ``device`` has with its reference now, as a run starts, and not in
    the midst of a step. On a CPU, whose kernels the tests check, nothing. Raises NativeMismatch.
    """
    if device.type == "cpu":
        return
    for op in checked_ops():
        if device.type in native_devices(op):
            verify(op, device, native_library())


@cache
def host_module() -> ModuleType | None:
    """`megarl._host`, or None where the references are used instead."""
    if choice() == "torch":
        return None
    if not any(_PACKAGE.glob("_host*.so")):  # not by import: an editable install would find its own
        if native_library() is not None:  # else nothing was built, and that has been said
            _report(f"there is no _host*.so in {_PACKAGE}: it was not built, {_NEEDED}")
        return None
    try:
        return importlib.import_module("megarl._host")
    except ImportError as e:  # for another Python
        _report(f"megarl._host does not load: {e}")
        return None


def host_function(op: str, name: str) -> Callable[..., Any] | None:
    """The compiled `name` for a call of the host op `op`, or None; counts the call."""
    module = host_module()
    found: Callable[..., Any] | None = getattr(module, name, None)
    if module is not None and found is None:
        _report_stale(op)
    count_call(op, found is not None)
    return found


@cache
def _report_stale(op: str) -> None:
    _report(f"megarl._host is older than its sources: it does not have all of {op}")


def count_call(op: str, native: bool) -> None:
    _calls[op, "native" if native else "torch"] += 1


def call_counts() -> dict[str, dict[str, int]]:
    """Of this process: op -> {"native" or "torch": calls}."""
    found: dict[str, dict[str, int]] = {}
    for (op, kind), count in sorted(_calls.items()):
        found.setdefault(op, {})[kind] = count
    return found


def backends(ops: Iterable[str], device: torch.device) -> dict[str, str]:
    """Op -> "native" or "torch" on `device`; host ops do not depend on it."""

    def native(op: str) -> bool:
        return host_module() is not None if op in HOST_OPS else device.type in native_devices(op)

    return {op: "native" if native(op) else "torch" for op in ops}


def _report(reason: str) -> None:
    message = (
        f"the compiled operators are not in use, the slower torch references are: {reason}. "
        f"To build them, run in the repository: {BUILD_COMMAND}"
    )
    if choice() == "native":
        raise ImportError(f"MEGARL_OPS=native, but {message}")
    log.warning(message)
