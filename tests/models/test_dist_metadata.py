"""What is taken from ``.metadata``, its checksum, and objects that are more than data."""

import io
import json
import subprocess
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.errors import DataError
from megarl.models.dist_metadata import (
    StoredBytes,
    read_metadata,
    record_checksum,
    require_safe,
)
from tests.helpers.pickled import (
    CALLS,
    PLACES,
    READ,
    Refused,
    calls,
    dumped,
    of_metadata,
    trusted_object,
)


def info(*fields: Any) -> dict[MetadataIndex, _StorageInfo]:
    places = {i: _StorageInfo(*w) for i, w in PLACES}
    return places | {MetadataIndex("vector", [0]): _StorageInfo(*fields)}


def tensor(shape: Any, offsets: Any, sizes: Any, dtype: Any = torch.float32) -> Metadata:
    found = of_metadata()
    chunk = ChunkStorageMetadata(offsets, sizes)
    properties = TensorProperties(dtype=dtype)
    found.state_dict_metadata["vector"] = TensorStorageMetadata(properties, shape, [chunk])
    return found


ONE, TWO = torch.Size([5]), torch.Size([5, 1])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (of_metadata(storage_data=info("../secret", 0, 1)), "lies in '../secret'"),
        (of_metadata(storage_data=info("/etc/passwd", 0, 1)), "lies in '/etc/passwd'"),
        (of_metadata(storage_data=info("a/../b", 0, 1)), "lies in 'a/../b'"),
        (of_metadata(storage_data=info("..", 0, 1)), "lies in '..'"),
        (of_metadata(storage_data=info("", 0, 1)), "lies in ''"),
        (of_metadata(storage_data=info(".metadata", 0, 1)), "lies in '.metadata'"),
        (of_metadata(storage_data=info("a\0b", 0, 1)), "accepted: a file of the folder"),
        (of_metadata(storage_data=info(b"x", 0, 1)), "opcode SHORT_BINBYTES"),
        (of_metadata(storage_data=info("x", -1, 1)), "vector: found -1"),
        (of_metadata(storage_data=info("x", True, 1)), "vector: found True"),
        (of_metadata(storage_data=info("x", 0, 2**64)), f"vector: found {2**64}"),
        (of_metadata(storage_data=info("x", 0, None)), "vector: found None"),
        (of_metadata(storage_data=info("x", 0, 1, ["zstd"])), "stored as ['zstd']"),
        (of_metadata(storage_data=None), "storage_data: found None"),
        (of_metadata(storage_data={"vector": _StorageInfo("x", 0, 1)}), "accepted: MetadataIndex"),
        (of_metadata(storage_data={}), "it does not say where matrix at [0, 0] lies"),
        (of_metadata(state_dict_metadata=[]), "state_dict_metadata: found []"),
        (of_metadata(state_dict_metadata={1: None}), "a key of state_dict_metadata: found 1"),
        (of_metadata(state_dict_metadata={"a": None}), "accepted: TensorStorageMetadata"),
        (tensor(ONE, ONE, TWO), "vector [5] has a chunk [5, 1]"),
        (tensor((5,), ONE, ONE), "accepted: a torch.Size"),
        (tensor(ONE, ONE, None), "vector: found None; accepted: a torch.Size"),
        (tensor(ONE, ONE, ONE, "float32"), "vector: dtype: found 'float32'"),
        ({"matrix": 1}, "accepted: Metadata"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_contradicts_itself_is_refused(refused: Refused, value: Any, named: str) -> None:
    assert named in refused(dumped(value))


# --- checksums ------------------------------------------------------------------------------------


def test_a_file_that_was_changed_is_not_even_looked_at(
    refused: Refused, folder: Path, marker: Path
) -> None:
    record_checksum(folder)
    data = (folder / ".metadata").read_bytes()
    assert read_metadata(folder) == READ
    sums = json.loads((folder / "checksums.json").read_text())
    command = ["sha256sum", str(folder / ".metadata")]
    assert sums == {".metadata": subprocess.check_output(command, text=True).split()[0]}
    for changed in (
        data.replace(b"matrix", b"matriz"),
        data + b"\n",
        data[:-1],
        dumped(calls(marker)["posix.system"]),
    ):
        said = refused(changed)
        assert "was changed after the checkpoint was written: found sha256" in said
        assert sums[".metadata"] in said


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", b"null", b"{", b"\xff"])
def test_a_damaged_checksum_is_refused_by_name(folder: Path, damage: bytes) -> None:
    (folder / "checksums.json").write_bytes(damage)
    with pytest.raises(DataError, match=r"checksums\.json is damaged"):
        read_metadata(folder)


def test_a_folder_without_metadata_has_no_checksum(tmp_path: Path) -> None:
    record_checksum(tmp_path)
    assert not list(tmp_path.iterdir())


# --- objects --------------------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_object(folder: Path, data: bytes, begin: int = 0) -> Path:
    (folder / "__0_0.distcp").write_bytes(b"\0" * begin + data)
    places = {i: _StorageInfo(*w) for i, w in PLACES}
    places[MetadataIndex("common_state/shard_0_1")] = _StorageInfo("__0_0.distcp", begin, len(data))
    (folder / ".metadata").write_bytes(dumped(of_metadata(storage_data=places)))
    return folder


HARMLESS = [[{}], [{"steps": 3.0, "betas": (0.9, 0.95)}], [OrderedDict(a=torch.ones(3))], [None]]


@pytest.mark.parametrize("value", HARMLESS, ids=repr)
def test_objects_that_are_data_are_accepted(folder: Path, value: Any) -> None:
    assert require_safe(with_object(folder, saved(value), 7)).objects["common_state/shard_0_1"] == (
        StoredBytes("__0_0.distcp", 7, len(saved(value)))
    )
    (folder / "common.pt").write_bytes(saved(value))
    require_safe(folder)


@pytest.mark.parametrize("name", CALLS)
def test_objects_that_are_more_than_data_are_refused(folder: Path, marker: Path, name: str) -> None:
    evil = saved([{"optimizer": [calls(marker)[name]]}])
    trusted_object(evil)
    assert marker.exists()  # as it would be in upstream's loader
    marker.unlink()
    with pytest.raises(DataError, match=r"__0_0\.distcp: common_state/shard_0_1 is refused"):
        require_safe(with_object(folder, evil))
    (folder / "common.pt").write_bytes(evil)
    with pytest.raises(DataError, match=r"common\.pt is refused"):
        require_safe(with_object(folder, saved([{}])))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["__0.metadata", "__13.metadata", "x.metadata"])
def test_metadata_of_single_ranks_is_refused(folder: Path, name: str) -> None:
    """Where ``.metadata`` pleases us and not torch, torch reads those."""
    require_safe(with_object(folder, saved([{}])))
    (folder / name).write_bytes((folder / ".metadata").read_bytes())
    with pytest.raises(DataError, match=rf"holds {name} beside \.metadata"):
        require_safe(folder)


@pytest.mark.parametrize("data", [b"", b"PK", b"\x80\x04N.", saved([{}])[:-5]], ids=repr)
def test_damaged_objects_are_refused(folder: Path, data: bytes) -> None:
    with pytest.raises(DataError, match="common_state/shard_0_1 is refused"):
        require_safe(with_object(folder, data))


def test_an_object_beyond_its_file_is_refused(folder: Path) -> None:
    with_object(folder, saved([{}]))
    (folder / "__0_0.distcp").write_bytes(saved([{}])[:-1])
    with pytest.raises(DataError, match=r"__0_0\.distcp is truncated"):
        require_safe(folder)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(DataError, match=r"__0_0\.distcp: No such file"):
        require_safe(folder)
