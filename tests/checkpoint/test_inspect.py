"""``inspect_checkpoint``: what is there, everything that is wrong, every difference."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.inspect import check, compare, describe
from megarl.checkpoint.workers import Workers
from megarl.convert import Import
from megarl.errors import DataError
from megarl.ops.digest import digest
from tests.helpers.families import save_model

EXPERTS = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"  # [8, 40, 32]: gate, up
NORM = "decoder.final_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
Edit = Callable[[Metadata], None]
Spoil = Callable[[Path], list[str]]  # a checkpoint; returns what is to be said of it


def published(hf: Path, out: Path) -> Path:
    Import(hf).run(out, Workers())
    return out


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe tied", tmp_path_factory.mktemp("hf") / "m", torch.bfloat16)


@pytest.fixture(scope="module")
def sound(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(hf, tmp_path_factory.mktemp("sound") / "checkpoint")


@pytest.fixture
def checkpoint(sound: Path, tmp_path: Path) -> Path:
    """A copy, to be spoiled. Without a checksum, which would tell of every edit."""
    copy = Path(shutil.copytree(sound, tmp_path / "checkpoint"))
    (copy / "megatron" / "checksums.json").unlink()
    return copy


def edit(checkpoint: Path, change: Edit) -> None:
    folder = checkpoint / "megatron"
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    results = [WriteResult(i, w.length, w) for i, w in metadata.storage_data.items()]
    FileSystemWriter(folder).finish(metadata, [results])


def where(checkpoint: Path, key: str, offsets: list[int] | None) -> Any:
    metadata = FileSystemReader(checkpoint / "megatron").read_metadata()
    return metadata.storage_data[MetadataIndex(key, offsets)]


# --- what it holds --------------------------------------------------------------------------------


def test_everything_is_described(hf: Path, sound: Path) -> None:
    found = describe(sound)
    assert found["step"] is None and found["critic"] is None
    assert found["model"] == json.loads((sound / "model.json").read_text())
    part = found["parts"]["megatron"]
    assert part["tensors"][EXPERTS] == {
        **{"shape": [8, 40, 32], "dtype": "bfloat16", "chunks": 16, "grid": [8, 2, 1]},
        "bytes": 8 * 40 * 32 * 2,
    }
    assert part["tensors"][NORM]["grid"] == [1]
    assert list(part["objects"]) == ["common_state/shard_0_1"]
    given = load_file(hf / "model.safetensors")
    assert {n: d["digest"] for n, d in found["imported"].items()} == {
        n: digest(t) for n, t in given.items()
    }
    padding = (64 - 30) * 32  # rows of the embedding
    assert part["bytes"] == 2 * (sum(t.numel() for t in given.values()) + padding)


def test_a_part_by_itself_and_a_runs_step_are_described(sound: Path, tmp_path: Path) -> None:
    assert list(describe(sound / "megatron")["parts"]) == [""]
    run = Path(shutil.copytree(sound, tmp_path / "step_7"))
    (run / "loop.json").write_text('{"step": 7}')
    shutil.copytree(run / "megatron", run / "reference")
    found = describe(run)
    assert found["step"] == 7 and list(found["parts"]) == ["megatron", "reference"]
    assert not check(run)


@pytest.mark.parametrize("name", ["nothing", "hf", "hf/config.json"])
def test_what_is_no_checkpoint_is_refused(sound: Path, name: str) -> None:
    with pytest.raises(DataError, match="is no checkpoint"):
        describe(sound / name)


# --- faults ---------------------------------------------------------------------------------------


def a_chunk_left_out(checkpoint: Path) -> list[str]:
    edit(checkpoint, lambda m: m.state_dict_metadata[EXPERTS].chunks.pop(5))
    return [f"{EXPERTS}: chunks hold {8 * 40 * 32 - 20 * 32} of {8 * 40 * 32} elements"]


def a_chunk_twice(checkpoint: Path) -> list[str]:
    def change(metadata: Metadata) -> None:
        chunks = metadata.state_dict_metadata[EXPERTS].chunks
        chunks.append(chunks[3])

    edit(checkpoint, change)
    chunk = f"{EXPERTS}: the chunk [1, 20, 32] at [1, 20, 0]"
    return [
        f"{chunk} overlaps that at [1, 20, 0]",
        f"__0_0.distcp: {EXPERTS} at [1, 20, 0] lies in bytes of {EXPERTS} at [1, 20, 0]",
    ]


def moved(to: list[int]) -> Edit:
    def change(metadata: Metadata) -> None:
        tensor, places = metadata.state_dict_metadata[EXPERTS], metadata.storage_data
        last = tensor.chunks[-1]
        tensor.chunks[-1] = replace(last, offsets=torch.Size(to))
        places[MetadataIndex(EXPERTS, to)] = places.pop(MetadataIndex(EXPERTS, last.offsets))

    return change


def a_chunk_across_two(checkpoint: Path) -> list[str]:
    edit(checkpoint, moved([6, 10, 0]))
    chunk = f"{EXPERTS}: the chunk [1, 20, 32] at "
    return [
        f"{chunk}[6, 10, 0] overlaps that at [6, 0, 0]",
        f"{chunk}[6, 20, 0] overlaps that at [6, 10, 0]",
    ]


def a_chunk_out_of_its_tensor(checkpoint: Path) -> list[str]:
    edit(checkpoint, moved([7, 30, 0]))
    return [f"{EXPERTS}: the chunk [1, 20, 32] at [7, 30, 0] reaches out of [8, 40, 32]"]


def two_in_the_same_bytes(checkpoint: Path) -> list[str]:
    def change(metadata: Metadata) -> None:
        places = metadata.storage_data
        places[MetadataIndex(EXPERTS, [4, 0, 0])] = places[MetadataIndex(EXPERTS, [3, 0, 0])]

    edit(checkpoint, change)
    return [f"__0_0.distcp: {EXPERTS} at [4, 0, 0] lies in bytes of {EXPERTS} at [3, 0, 0]"]


def another_dtype(checkpoint: Path) -> list[str]:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata[NORM].properties.dtype = torch.float16

    edit(checkpoint, change)
    return [f"{NORM} at [0]: found bfloat16; the tensor's is float16"]


def a_file_gone(checkpoint: Path) -> list[str]:
    (checkpoint / "megatron" / "__0_0.distcp").unlink()
    return ["__0_0.distcp is missing"]


def a_file_cut_short(checkpoint: Path) -> list[str]:
    file = checkpoint / "megatron" / "__0_0.distcp"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    return [f"__0_0.distcp is truncated: {size - 1} bytes, {size} are needed"]


def flip(checkpoint: Path, at: int, bit: int) -> None:
    file = checkpoint / "megatron" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[at] ^= bit
    file.write_bytes(data)


def a_bit_of_a_value(checkpoint: Path) -> list[str]:
    place = where(checkpoint, NORM, [0])
    values = (checkpoint / "megatron" / "__0_0.distcp").read_bytes()
    raw = load_file(checkpoint / "norm")["model.norm.weight"].view(torch.uint8).numpy().tobytes()
    at = values.index(raw, place.offset)
    assert at < place.offset + place.length
    flip(checkpoint, at + 11, 4)
    return [f"__0_0.distcp: {NORM} at [0] is damaged (Bad CRC-32"]


def a_bit_of_an_object(checkpoint: Path) -> list[str]:
    place = where(checkpoint, "common_state/shard_0_1", None)
    data = (checkpoint / "megatron" / "__0_0.distcp").read_bytes()
    flip(checkpoint, data.index(b"\x80\x02", place.offset) + 2, 1)
    return ["__0_0.distcp: common_state/shard_0_1 is damaged ("]


def another_model(checkpoint: Path) -> list[str]:
    path = checkpoint / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab": 70}))
    return [f"megatron: {EMBEDDING}: found [64, 32]; the model's is [128, 32]"]


def tensors_of_the_model_gone(checkpoint: Path) -> list[str]:
    names = [NORM, EXPERTS, "decoder.layers.0.mlp.router.weight"]

    def change(metadata: Metadata) -> None:
        for name in names:
            del metadata.state_dict_metadata[name]

    edit(checkpoint, change)
    return [f"missing {name} [" for name in names]


def no_model(checkpoint: Path) -> list[str]:
    (checkpoint / "model.json").unlink()
    return ["model.json: [Errno 2] No such file or directory"]


def damaged_digests(checkpoint: Path) -> list[str]:
    (checkpoint / "digests.json").write_text("{}")
    return ["digests.json: found format None; accepted: 1"]


def a_pickle_with_code(checkpoint: Path) -> list[str]:
    (checkpoint / "megatron" / ".metadata").write_bytes(b"\x8c\x05posix\x8c\x06system\x93.")
    return ["found posix.system at byte 15"]


SPOILS = [a_chunk_left_out, a_chunk_twice, a_chunk_across_two, a_chunk_out_of_its_tensor]
SPOILS += [two_in_the_same_bytes, another_dtype, a_file_gone, a_file_cut_short, a_bit_of_a_value]
SPOILS += [a_bit_of_an_object, another_model, tensors_of_the_model_gone, no_model]
SPOILS += [damaged_digests, a_pickle_with_code]


@pytest.fixture
def spoilable(hf: Path, checkpoint: Path) -> Path:
    """With the norm's values beside, to find them in the file."""
    norm = load_file(hf / "model.safetensors")["model.norm.weight"]
    save_file({"model.norm.weight": norm}, checkpoint / "norm")
    return checkpoint


def test_a_sound_checkpoint_has_no_fault(sound: Path, checkpoint: Path) -> None:
    assert not check(sound) and not check(checkpoint) and not check(sound / "megatron")


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_is_wrong_is_named(spoilable: Path, spoil: Spoil) -> None:
    expected = spoil(spoilable)
    found = check(spoilable)
    assert len(found) == len(expected), found
    for text in expected:
        assert sum(text in fault for fault in found) == 1, (text, found)


def test_everything_that_is_wrong_is_named_together(spoilable: Path) -> None:
    expected = a_bit_of_a_value(spoilable) + a_bit_of_an_object(spoilable)
    for spoil in (a_chunk_left_out, a_chunk_out_of_its_tensor, another_model, damaged_digests):
        expected += spoil(spoilable)
    found = check(spoilable)
    assert len(found) == len(expected) == 6
    left_out = "chunks hold "  # whose number changed with the other
    for text in expected:
        text = text if left_out not in text else text.partition(left_out)[0]
        assert any(text in fault for fault in found), (text, found)


# --- differences ----------------------------------------------------------------------------------


def changed(hf: Path, out: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(hf, out / "hf")
    tensors = load_file(hf / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "hf" / "model.safetensors", metadata={"format": "pt"})
    return published(out / "hf", out / "checkpoint")


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (("model.norm.weight", (7,), 1), NORM),
        (("model.layers.2.mlp.experts.6.up_proj.weight", (19, 31), 0x4000), EXPERTS),
        (("model.embed_tokens.weight", (29, 0), -0x8000), EMBEDDING),  # the sign
    ],
)
def test_a_bit_is_a_difference(
    hf: Path, sound: Path, tmp_path: Path, value: tuple[str, tuple[int, ...], int], key: str
) -> None:
    name, at, bit = value

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(torch.int16)[at] ^= bit

    other = changed(hf, tmp_path, change)
    (line,) = compare(sound, other)
    assert line.startswith(f"megatron: {key}: other values (digests ")
    assert not compare(sound, sound) and not compare(other, other)
    assert len(compare(sound / "megatron", other)) == 1  # a part, and a whole one


def test_keys_shapes_dtypes_parts_and_models_are_compared(
    sound: Path, checkpoint: Path, tmp_path: Path
) -> None:
    def change(metadata: Metadata) -> None:
        tensors = metadata.state_dict_metadata
        del tensors[NORM]
        tensors["decoder.layers.0.mlp.router.weight"].properties.dtype = torch.float32
        tensors[EMBEDDING].size = torch.Size([63, 32])

    edit(checkpoint, change)
    another_model(checkpoint)
    shutil.copytree(sound / "megatron", checkpoint / "critic")
    expected = [
        "model.json: vocab: 30, 70",
        f"critic: only in {checkpoint}",
        f"megatron: {NORM}: only in {sound / 'megatron'}",
        "megatron: decoder.layers.0.mlp.router.weight: [8, 32] bfloat16, [8, 32] float32",
        f"megatron: {EMBEDDING}: [64, 32] bfloat16, [63, 32] bfloat16",
    ]
    assert sorted(compare(sound, checkpoint)) == sorted(expected)


@pytest.mark.parametrize("spoil", [a_chunk_left_out, a_bit_of_a_value, another_dtype])
def test_what_cannot_be_compared_is_an_error(sound: Path, spoilable: Path, spoil: Spoil) -> None:
    """Two halves are not equal because their digests are."""
    spoil(spoilable)
    with pytest.raises(DataError):
        compare(spoilable, Path(shutil.copytree(spoilable, spoilable.with_name("same"))))


def test_a_part_is_not_compared_with_itself_where_the_other_has_none(
    sound: Path, checkpoint: Path
) -> None:
    (checkpoint / "megatron").rename(checkpoint / "reference")
    for one, other in ((sound / "megatron", checkpoint), (checkpoint, sound / "megatron")):
        with pytest.raises(DataError, match="holds no megatron; name its reference instead"):
            compare(one, other)
    assert compare(sound / "megatron", checkpoint / "reference") == []


@pytest.mark.parametrize("gone", ["megatron", "hf"])
def test_what_a_whole_checkpoint_lacks_is_named(checkpoint: Path, gone: str) -> None:
    shutil.copytree(checkpoint / "megatron", checkpoint / "reference")
    (checkpoint / gone).rename(checkpoint.parent / "gone")
    inside = {"megatron": "metadata.json", "hf": "config.json"}[gone]
    assert f"{checkpoint / gone / inside} is missing" in check(checkpoint)
