"""A folder of weights that a run has published for its servers (``sync/version_folders.py``), and
the lease by which a reader keeps it.

``weights.digests`` lies in every such folder: {"version", "digest", "digests": {name: digest}}. A
reader holds it locked (flock, shared) as long as it reads; what is locked is not removed. Its name
ends as nothing does that is copied along with a model (``hf_files.py``).
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
        with suppress(OSError):  # a file system without locks
            fcntl.flock(manifest, fcntl.LOCK_SH)
        yield


def is_read(folder: Path) -> bool:
    """Whether somebody is ``reading`` it, on whatever machine, where the file system knows."""
    with suppress(OSError), (folder / MANIFEST).open("rb") as manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
