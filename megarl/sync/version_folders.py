"""Weights in folders that trainer and servers share: Hugging Face folders, one a version.

::

    FOLDER/version_7/            the last two; model-*.safetensors, their index, what lies beside
                                 the weights of the served model, and their digests
                                 (models/published.py)
    FOLDER/.megarl-staging-*/    what is being written
    FOLDER/.megarl-gone-*/       what is being removed
    FOLDER/.megarl-lock          held (flock) by rank 0 of the run that writes here

1. A folder that is called ``version_N`` is whole and durable: it gets that name by a rename.
2. A run that is killed leaves staging folders and nothing else; whoever owns the folder next
   removes them. Versions of an earlier run go with the first that is published.
3. What somebody is reading (``published.reading``) is not removed, nor what cannot be locked, which
   is no news of readers; it goes later.
4. Whatever else is in FOLDER is left alone.
5. Other ranks' files may come to rank 0's sight late: machines keep listings of network folders for
   up to a minute (NFS: ``acdirmax``). It looks again for what is missing.
"""

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.errors import SyncError
from megarl.models.config_json import read_object
from megarl.models.hf_fp8 import KEY
from megarl.models.hf_headers import INDEX, Place, read_file
from megarl.models.hf_write import write_beside
from megarl.models.published import MANIFEST, is_read
from megarl.rundir import sync_path, write_json
from megarl.sync.stream import dtype_name, push_digest
from megarl.types import TensorSpec

KEPT = 2
LISTED_S = 90.0  # by when a listing shows what others wrote before: NFS keeps one for 60 s at most
_LOOK_S = 0.25
_STAGING, _GONE, _LOCK = ".megarl-staging-", ".megarl-gone-", ".megarl-lock"
_VERSION = "version_"


def staging(folder: Path, run: str, attempt: int) -> Path:
    return folder / f"{_STAGING}{run}-{attempt}"


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"{_VERSION}{version}"


@contextmanager
def blamed_on(folder: Path) -> Iterator[None]:
    """What the file system refuses is a SyncError that names the folder."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        where = "" if error.filename is None else f" ({error.filename})"
        raise SyncError(f"sync.folder {folder}: cannot be written to: {why}{where}") from error


class Publisher:
    """Rank 0's part: owns the folder until it is closed, or its process ends."""

    def __init__(self, folder: Path, beside: Path) -> None:
        """``beside``: the Hugging Face folder that servers serve. Raises SyncError where another
        run owns ``folder``, or it cannot be written to.
        """
        self.folder, self._beside = folder, beside
        self._published: list[int] = []
        with blamed_on(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = _own(folder)
            for pattern in (f"{_STAGING}*", f"{_GONE}*"):
                for path in folder.glob(pattern):
                    shutil.rmtree(path, ignore_errors=True)

    def publish(
        self, staged: Path, version: int, digests: Mapping[str, str], within_s: float = 0.0
    ) -> Path:
        """The files in ``staged`` are durable. Raises SyncError if they are not exactly the tensors
        of ``digests``, or are not to be seen ``within_s``.
        """
        out = version_folder(self.folder, version)
        with blamed_on(self.folder):
            places = _all_places(staged, digests, min(within_s, LISTED_S))
            self._complete(staged, version, digests, places)
            if (out / MANIFEST).is_file():  # of a run that went on from the same step
                self._remove(out)
            os.replace(staged, out)
            sync_path(self.folder)
            self._published.append(version)
            self._prune()
        return out

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _complete(
        self,
        staged: Path,
        version: int,
        digests: Mapping[str, str],
        places: Mapping[str, Place],
    ) -> None:
        """Everything but the weights."""
        codes = any(place.dtype == torch.float8_e4m3fn for place in places.values())
        quantization = read_object(self._beside / "config.json").get(KEY) if codes else None
        write_beside(self._beside, staged, _specs(places), quantization)
        total = sum(place.end - place.begin for place in places.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: place.file.name for name, place in places.items()},
        }
        write_json(staged / INDEX, index)
        told = {"version": version, "digest": push_digest(digests), "digests": dict(digests)}
        write_json(staged / MANIFEST, told)
        for path in (*staged.rglob("*"), staged):
            if path.suffix != ".safetensors":
                sync_path(path)

    def _prune(self) -> None:
        kept = {version_folder(self.folder, v) for v in self._published[-KEPT:]}
        for path in self.folder.glob(f"{_VERSION}*"):
            ours = path.name.removeprefix(_VERSION).isdecimal() and (path / MANIFEST).is_file()
            if ours and path not in kept and not is_read(path):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f"{_GONE}{path.name}-{os.getpid()}-{len(self._published)}")
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _own(folder: Path) -> int:
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(handle, 200).decode(errors="replace")
        os.close(handle)
        raise SyncError(
            f"sync.folder {folder}: another run writes there ({holder or 'unnamed'}); name another "
            "folder, or end it"
        ) from error
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()} on {socket.gethostname()}".encode())
    return handle


def _all_places(staged: Path, digests: Mapping[str, str], within_s: float) -> dict[str, Place]:
    """Of exactly the tensors of ``digests``; what is missing is looked for again."""
    deadline = time.monotonic() + within_s
    while True:
        places = _places(sorted(staged.glob("*.safetensors")))
        missing, more = sorted(digests.keys() - places), sorted(places.keys() - digests)
        if not missing and not more:
            return places
        if more or time.monotonic() >= deadline:
            raise SyncError(
                f"{staged} does not hold what was sent: {len(missing)} tensors are missing "
                f"{missing[:3]}, {len(more)} were not sent {more[:3]}; do all ranks share this "
                f"file system? Looked for {within_s:g} s"
            )
        time.sleep(_LOOK_S)


def _places(files: list[Path]) -> dict[str, Place]:
    """Of all files together. Raises SyncError for a tensor that is in two."""
    places: dict[str, Place] = {}
    for file in files:
        for name, place in read_file(file).items():
            if name in places:
                raise SyncError(f"{name} was sent twice: in {places[name].file} and in {file}")
            places[name] = place
    return places


def _specs(places: Mapping[str, Place]) -> list[TensorSpec]:
    return [TensorSpec(name, p.shape, dtype_name(p.dtype)) for name, p in places.items()]
