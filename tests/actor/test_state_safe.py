"""A checkpoint that holds more than data is refused before Megatron's loader unpickles it."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megarl.models.dist_metadata import record_checksum
from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def an_object(folder: Path, evil: Touch) -> str:
    """Where Megatron's loader finds what is not a tensor; torch loads it without restriction."""
    metadata = FileSystemReader(folder).read_metadata()
    stream = io.BytesIO()
    torch.save([{"a": [evil]}], stream)
    (folder / "evil.distcp").write_bytes(stream.getvalue())
    places = dict(metadata.storage_data)
    length = len(stream.getvalue())
    index = MetadataIndex("common_state/shard_0_1")
    assert index in places
    places[index] = _StorageInfo("evil.distcp", 0, length)
    results = [WriteResult(i, w.length, w) for i, w in places.items()]
    FileSystemWriter(folder).finish(metadata, [results])
    return "evil.distcp: common_state/shard_0_1 is refused"


def a_common_file(folder: Path, evil: Touch) -> str:
    torch.save({"args": evil}, folder / "common.pt")
    return "common.pt is refused"


def the_metadata(folder: Path, evil: Touch) -> str:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = evil
    results = [WriteResult(i, w.length, w) for i, w in metadata.storage_data.items()]
    FileSystemWriter(folder).finish(metadata, [results])
    return "found posix.system at byte"


def the_metadata_of_a_rank(folder: Path, evil: Touch) -> str:
    """Which torch reads where the other is none to it."""
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = evil
    results = [WriteResult(i, w.length, w) for i, w in metadata.storage_data.items()]
    original = (folder / ".metadata").read_bytes()
    FileSystemWriter(folder).finish(metadata, [results])
    (folder / ".metadata").rename(folder / "__0.metadata")
    (folder / ".metadata").write_bytes(original.replace(b"torch.strided", b"torch.strider"))
    return "holds __0.metadata beside .metadata"


def the_metadata_in_a_word(folder: Path, evil: Touch) -> str:
    record_checksum(folder)
    data = (folder / ".metadata").read_bytes()
    assert b"output_layer" in data
    (folder / ".metadata").write_bytes(data.replace(b"output_layer", b"output_bayer"))
    return "was changed after the checkpoint was written"


@pytest.fixture(scope="module")
def checkpoint(
    pool: WorkerPool, tiny_small: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("weights") / "saved"
    work = "tests.actor.work_state:saved_weights"
    pool.run(work, world=1, hf=tiny_small, layout={}, path=path)
    return path


@pytest.mark.parametrize(
    "spoil",
    [an_object, a_common_file, the_metadata, the_metadata_of_a_rank, the_metadata_in_a_word],
)
def test_a_checkpoint_with_code_is_refused_and_none_of_it_runs(
    pool: WorkerPool,
    tiny_small: Path,
    checkpoint: Path,
    tmp_path: Path,
    spoil: Callable[[Path, Touch], str],
) -> None:
    folder, marker = tmp_path / "spoiled", tmp_path / "marker"
    shutil.copytree(checkpoint, folder)
    expected = spoil(folder, Touch(marker))
    work = "tests.actor.work_state:refusals"
    (texts,) = pool.run(work, world=1, hf=tiny_small, layout={}, path=folder)
    assert len(texts) == 2 and all(expected in text for text in texts), texts
    assert not marker.exists()
