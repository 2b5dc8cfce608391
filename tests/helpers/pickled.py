"""Files that are pickles by format: a sound ``.metadata``, and what must not be run where it is in
one. Every attack makes a marker file where it succeeds.
"""

import io
import os
import pickle
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.models.dist_metadata import DistMetadata, StoredBytes, StoredChunk, StoredTensor

Refused = Callable[[bytes], str]


def dumped(value: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol)


def trusted(data: bytes) -> Any:
    """What Python makes of a pickle."""
    return pickle.loads(data)


def trusted_object(data: bytes) -> Any:
    """What torch makes of it without restriction."""
    return torch.load(io.BytesIO(data), weights_only=False)


class Call:
    """Pickled as a call of ``function``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> Any:
        return self.reduced

    def __call__(self) -> None:
        """So that what a call returns can be called."""


class OurOwn:
    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["marker"]).touch()

    def __getstate__(self) -> dict[str, str]:
        return {"marker": os.environ["MEGARL_TEST_MARKER"]}


def metadata() -> Metadata:
    """Of a matrix in two chunks, the second beyond 4 GiB, a vector and an object."""
    sizes = [torch.Size(s) for s in ([0, 0], [4, 0], [4, 3])]
    properties = TensorProperties(dtype=torch.bfloat16)
    chunks = [ChunkStorageMetadata(offset, sizes[2]) for offset in sizes[:2]]
    vector = [ChunkStorageMetadata(torch.Size([0]), torch.Size([5]))]
    return Metadata(
        {
            "matrix": TensorStorageMetadata(properties, torch.Size([8, 3]), chunks),
            "vector": TensorStorageMetadata(TensorProperties(), torch.Size([5]), vector),
            "common_state/shard_0_1": BytesStorageMetadata(),
        }
    )


PLACES = [
    (MetadataIndex("matrix", [0, 0]), ("__0_0.distcp", 100, 24)),
    (MetadataIndex("matrix", [4, 0]), ("__1_0.distcp", 2**33, 24)),
    (MetadataIndex("vector", [0]), ("__0_0.distcp", 124, 20)),
    (MetadataIndex("common_state/shard_0_1"), ("__0_0.distcp", 0, 100)),
]
READ = DistMetadata(
    {
        "matrix": StoredTensor(
            (8, 3),
            torch.bfloat16,
            (
                StoredChunk((0, 0), (4, 3), StoredBytes("__0_0.distcp", 100, 24)),
                StoredChunk((4, 0), (4, 3), StoredBytes("__1_0.distcp", 2**33, 24)),
            ),
        ),
        "vector": StoredTensor(
            (5,),
            torch.float32,
            (StoredChunk((0,), (5,), StoredBytes("__0_0.distcp", 124, 20)),),
        ),
    },
    {"common_state/shard_0_1": StoredBytes("__0_0.distcp", 0, 100)},
    None,
)


def calls(marker: Path) -> dict[str, Any]:
    """By the name that is refused."""
    command, code = f"touch {marker}", f"open({str(marker)!r}, 'w')"
    return {
        "posix.system": Call(os.system, command),
        "builtins.eval": Call(eval, code),
        "builtins.exec": Call(exec, code),
        "io.open": Call(open, str(marker), "w"),
        "subprocess.check_call": Call(subprocess.check_call, ["touch", str(marker)]),
        "functools.partial": Call(partial(os.system, command)),
        f"{__name__}.OurOwn": OurOwn(),
        "pathlib.Path.touch": Call(Path.touch, marker),
    }


def by_attributes(marker: Path) -> Any:
    """Of nothing but an innocent class and ``getattr``."""
    names = Call(getattr, Call(getattr, Metadata, "__init__"), "__globals__")
    os_module = Call(Call(getattr, names, "get"), "os")
    return Call(Call(getattr, os_module, "system"), f"touch {marker}")


CALLS = list(calls(Path("marker")))


def of_metadata(**changes: Any) -> Metadata:
    found = metadata()
    found.storage_data = {i: _StorageInfo(*w) for i, w in PLACES}
    for key, value in changes.items():
        setattr(found, key, value)
    return found


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()
