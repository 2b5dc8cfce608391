"""A step's samples, from the ranks that collected them to the ranks that train on them.

Flat arrays with their lengths beside them (``recorded.py``), as bytes over a gloo group; nothing is
pickled.
"""

import io
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from megarl.data.recorded import pack_samples, unpack_samples
from megarl.hostcomm import broadcast_bytes
from megarl.types import Sample


def share_samples(
    local: Sequence[Sample], collectors: Sequence[int], rank: int, group: dist.ProcessGroup
) -> list[Sample]:
    """Every collector's samples on every rank, in the order of ``collectors``. Collective over
    ``group``.
    """
    samples: list[Sample] = []
    for collector in collectors:
        payload = _encode(local) if rank == collector else None
        received = broadcast_bytes(payload, collector, group)
        samples += local if rank == collector else _decode(received)
    return samples


def _encode(samples: Sequence[Sample]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **cast(Any, pack_samples(samples)))
    return file.getvalue()


def _decode(payload: bytes) -> list[Sample]:
    with np.load(io.BytesIO(payload), allow_pickle=False) as file:
        return unpack_samples({name: file[name] for name in file.files})
