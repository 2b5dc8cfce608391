"""A CUDA kernel is compared with its reference before it is first used.

A kernel can be wrong on one architecture or after one compiler's update, and nothing in a training
run would say so. The result is kept in a file named after all it depends on (GPU, torch, the
extension's build), so that a job's thousand ranks do not repeat it.
"""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

Check = Callable[[torch.device], None]
_checks: dict[str, Check] = {}


class NativeMismatch(RuntimeError):
    """A kernel that does not compute what its reference does."""


def self_check(op: str) -> Callable[[Check], Check]:
    """Registers what compares `op`'s kernel with its reference on a device: it raises an
    AssertionError that tells the difference.
    """

    def register(check: Check) -> Check:
        _checks[op] = check
        return check

    return register


def checked_ops() -> list[str]:
    return sorted(_checks)


def run_check(op: str, device: torch.device) -> None:
    """Raises NativeMismatch."""
    try:
        _checks[op](device)
    except AssertionError as e:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise NativeMismatch(
            f"the compiled {op} does not agree with its reference on {name}: {e}. Run with "
            "MEGARL_OPS=torch, and tools/verify_gpu.py for the details"
        ) from e


@cache
def verify(op: str, device: torch.device, library: Path | None) -> None:
    """Once a process and device. Raises NativeMismatch."""
    stamp = _stamp(op, device, library)
    if stamp.exists():
        return
    run_check(op, device)
    stamp.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    stamp.touch()


def _stamp(op: str, device: torch.device, library: Path | None) -> Path:
    build = hashlib.sha256(library.read_bytes()).hexdigest()[:16] if library else "none"
    arch = "".join(map(str, torch.cuda.get_device_capability(device)))
    cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache_dir / "megarl" / f"{op}-sm{arch}-torch{torch.__version__}-{build}"
