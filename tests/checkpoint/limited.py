"""A conversion in a process that may take so many bytes of address space more than it has::

python -m tests.checkpoint.limited import|export SOURCE OUT BYTES THREADS [holes]

``holes``: blocks of zeros are left out of the files that are written, which are then as long and
read the same; so that a real model's shapes fit a disk.
"""

import io
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.checkpoint import torch_dist
from megarl.checkpoint.workers import Workers
from megarl.convert import Export, Import
from megarl.models import hf_write


def main() -> None:
    way, source, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    allowed, threads = int(sys.argv[4]), int(sys.argv[5])
    if sys.argv[6:] == ["holes"]:
        leave_holes()
    (used,) = (
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    resource.setrlimit(resource.RLIMIT_AS, (used + allowed, used + allowed))
    conversions: dict[str, Callable[[Path], Any]] = {"import": Import, "export": Export}
    conversion = conversions[way](source)
    conversion.num_bytes = 0  # that the disk cannot hold
    conversion.run(out, Workers(threads=threads))


def leave_holes() -> None:
    torch_dist.create = _Holes  # type: ignore[assignment]
    write = hf_write._write
    hf_write._write = lambda handle, data, at: None if zeros(data) else write(handle, data, at)


class _Holes(io.FileIO):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")

    def write(self, data: Any) -> int:
        raw = memoryview(data).cast("B")
        if not zeros(raw):
            return super().write(raw)
        self.seek(len(raw), os.SEEK_CUR)
        return len(raw)


def zeros(data: memoryview) -> bool:
    whole = len(data) // 8 * 8
    return not np.frombuffer(data[:whole], np.uint64).any() and not any(data[whole:])


if __name__ == "__main__":
    main()
