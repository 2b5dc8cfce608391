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
    """Let ``write(folder)``, in every process, make the folder ``out`` of ``num_bytes``; where
    ``out`` is a link to a folder, that one.

    Raises DataError if ``out`` is there and not an empty folder, cannot be made, or is being
    written by another conversion; RunError if the disk cannot hold it.
    """
    out = out.resolve()  # a rename replaces no link
    part = out.parent / f".{out.name}.part"
    locks: list[int] = []  # held here: in the first process, once it has prepared
    try:
        workers.first(f"preparing {out}", lambda: locks.append(_prepare(out, part, num_bytes)))
        write(part)
        workers.first(f"publishing {out}", lambda: _replace(part, out))
    finally:
        for lock in locks:
            shutil.rmtree(part, ignore_errors=True)
            sync_path(out.parent)
            _lock_of(part).unlink(missing_ok=True)
            os.close(lock)


def _prepare(out: Path, part: Path, num_bytes: int) -> int:
    """The lock that is held."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise DataError(f"{out} already exists; checkpoints are never overwritten")
        if os.path.ismount(out):
            why = "a rename cannot replace it; name a folder in it"
            raise DataError(f"{out} is where a disk is mounted: {why}")
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(_lock_of(part), os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as e:
        raise DataError(f"{out} cannot be made: {e.strerror}: {e.filename}") from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _require_current(lock, _lock_of(part))
    except BlockingIOError as e:
        os.close(lock)
        raise DataError(f"{out} is being written by another conversion") from e
    try:
        shutil.rmtree(part, ignore_errors=True)
        free = shutil.disk_usage(out.parent).free
        if free < num_bytes:
            needs = f"needs {num_bytes / 1e9:.2f} GB, {out.parent} has {free / 1e9:.2f} GB free"
            raise RunError(f"{out} {needs}")
        part.mkdir()
    except BaseException:
        _lock_of(part).unlink()
        os.close(lock)
        raise
    return lock


def _require_current(lock: int, path: Path) -> None:
    """Raises BlockingIOError where ``path`` is no longer the file that is locked: its holder ended
    in between, and another may hold the one that is there now.
    """
    try:
        if os.path.samestat(os.fstat(lock), path.stat()):
            return
    except FileNotFoundError:
        pass
    raise BlockingIOError


def _replace(part: Path, out: Path) -> None:
    """Durable, with all that is in it. Raises DataError if something has come to be there."""
    for path in (*part.rglob("*"), part):
        sync_path(path)
    try:
        os.replace(part, out)
    except OSError as e:
        raise DataError(f"{out} cannot be made: {e.strerror}; was it made meanwhile?") from e


def _lock_of(part: Path) -> Path:
    return part.with_suffix(".lock")
