"""What a conversion makes appears whole or not at all: written beside, under a lock, published by
rename. What a killed conversion left is removed by the next one to the same place.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megarl.checkpoint.workers import Workers
from megarl.errors import DataError, RunError
from megarl.rundir import sync_path


def publish(out: Path, workers: Workers, num_bytes: int, write: Callable[[Path], None]) -> None:
    """Let ``write(folder)``, in every process, make the folder ``out`` of ``num_bytes``.

    Raises DataError if ``out`` is there and not an empty folder, or is being written by another
    conversion; RunError if the disk cannot hold it.
    """
    part = out.with_name(f".{out.name}.part")
    lock = workers.first(f"preparing {out}", lambda: _prepare(out, part, num_bytes))
    try:
        write(part)
        workers.first(f"publishing {out}", lambda: os.replace(part, out))
    finally:
        if lock is not None:
            shutil.rmtree(part, ignore_errors=True)
            sync_path(out.parent)
            _lock_of(part).unlink(missing_ok=True)
            os.close(lock)


def _prepare(out: Path, part: Path, num_bytes: int) -> int:
    """The lock that is held."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists; checkpoints are never overwritten")
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(_lock_of(part), os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _lock_of(part).exists():  # its holder has just ended
            raise BlockingIOError
        shutil.rmtree(part, ignore_errors=True)
        free = shutil.disk_usage(out.parent).free
        if free < num_bytes:
            needs = f"needs {num_bytes / 1e9:.2f} GB, {out.parent} has {free / 1e9:.2f} GB free"
            raise RunError(f"{out} {needs}")
        part.mkdir()
    except BlockingIOError as e:
        os.close(lock)
        raise DataError(f"{out} is being written by another conversion") from e
    except BaseException:
        _lock_of(part).unlink()
        os.close(lock)
        raise
    return lock


def _lock_of(part: Path) -> Path:
    return part.with_suffix(".lock")
