"""A CUDA kernel is compared with its reference before it is first used.

A kernel can be wrong on one architecture or after one compiler's update, and nothing in a training
run would say so. What passed is kept in a file named after all it depends on (GPU architecture,
torch, the extension's build and the op's Python), so that a job's thousand ranks do not repeat it.
The file saves time and nothing else: where it cannot be read or written, the check runs.
"""

import hashlib
import inspect
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

Check = Callable[[torch.device], None]
_checks: dict[str, Check] = {}
_PASSED = "passed\n"


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
    if op not in _checks:
        raise NativeMismatch(f"{op} has no self-check, so its kernel is not used on {device}")
    try:
        with torch.no_grad():
            _checks[op](device)
    except Exception as e:  # also one that does not start: built for another architecture, say
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        found = "does not agree with its reference" if isinstance(e, AssertionError) else "fails"
        raise NativeMismatch(
            f"the compiled {op} {found} on {name}: {e}. Run with MEGARL_OPS=torch, and "
            "tools/verify_gpu.py for the details"
        ) from e


@cache
def verify(op: str, device: torch.device, library: Path | None) -> None:
    """Once a process and device. Raises NativeMismatch."""
    stamp = _stamp(op, device, library)
    if stamp is not None and _has_passed(stamp):
        return
    run_check(op, device)
    if stamp is not None:
        _remember(stamp)


def _stamp(op: str, device: torch.device, library: Path | None) -> Path | None:
    """The file that says that the check has passed. None without a place to keep it, or without the
    files that it is about.
    """
    arch = device.type
    if device.type == "cuda":
        arch = "sm" + "".join(map(str, torch.cuda.get_device_capability(device)))
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        name = f"{op}-{arch}-torch{torch.__version__}-{_build(op, library)}"
    except (OSError, RuntimeError) as e:  # RuntimeError: no home directory
        log.info("self-checks are not remembered: %s", e)
        return None
    return Path(home) / "megarl" / name


def _build(op: str, library: Path | None) -> str:
    """Of the kernel, its reference and its check."""
    check = _checks.get(op)
    python = inspect.getsourcefile(check) if check else None
    digests = [_digest(Path(path)) for path in (library, python) if path]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _has_passed(stamp: Path) -> bool:
    try:
        return stamp.read_text() == _PASSED
    except (OSError, UnicodeDecodeError):
        return False


def _remember(stamp: Path) -> None:
    """Whole or not at all, whatever other ranks do at the same time."""
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=stamp.parent) as own:
            written = Path(own) / stamp.name
            written.write_text(_PASSED)
            written.replace(stamp)
    except OSError as e:
        log.info("the self-check of %s is not remembered: %s", stamp.name, e)
