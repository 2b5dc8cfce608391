"""A folder of weights that a run has published for its servers (``sync/version_folders.py``), and
the lease by which a reader keeps it.

``weights.digests`` lies in every such folder: {"version", "digest", "digests": {name: digest}}. A
reader holds it locked (flock, shared) as long as it reads; what is locked is not removed. Its name
ends as nothing does that is copied along with a model (``hf_files.py``).
"""

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

MANIFEST = "weights.digests"


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Inside, the folder is not removed. Any other folder is none of this one's business."""
    try:
        manifest = (folder / MANIFEST).open("rb")
    except OSError:
        yield
        return
    with manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_SH)
        except OSError as error:
            log.warning("%s is read without a lock, and may be removed: %s", folder, error)
        yield


def is_read(folder: Path) -> bool:
    """Whether somebody is ``reading`` it, on whatever machine, as far as one can tell: where it
    cannot be locked, somebody may be.
    """
    try:
        _lock_alone(folder / MANIFEST)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        log.warning("%s stays: whether it is read cannot be told: %s", folder, error)
        return True
    return False


def _lock_alone(file: Path) -> None:
    """For a moment. NFS locks as ``fcntl`` does, alone only through what may be written to; other
    file systems do not ask, and a file may be another user's.
    """
    try:
        handle: IO[bytes] = file.open("r+b")
    except OSError:
        handle = file.open("rb")
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
