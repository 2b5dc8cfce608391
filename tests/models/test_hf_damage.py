"""Every kind of damage to a checkpoint is refused by the name of the file and the tensor."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import DataError
from megarl.models.hf_complete import check_complete, open_model
from megarl.models.hf_headers import INDEX
from megarl.models.hf_io import open_checkpoint
from megarl.models.spec import read_spec

Saved = Callable[[str], Path]
SOME = "model.layers.1.self_attn.q_proj.weight"


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def rewrite_shard(folder: Path, name: str, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change the shard that holds ``name`` with the library's own writer."""
    file = shard_of(folder, name)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        open_checkpoint(folder)
    return str(error.value)


def test_a_missing_shard(sharded: Path) -> None:
    file = shard_of(sharded, SOME)
    file.unlink()
    assert f"{file} is missing" in refusal(sharded)


@pytest.mark.parametrize("cut", [1, 3_000])
def test_a_truncated_shard(sharded: Path, cut: int) -> None:
    file = shard_of(sharded, SOME)
    os.truncate(file, file.stat().st_size - cut)
    assert f"{file} is truncated: tensor model." in refusal(sharded)


@pytest.mark.parametrize("size", [0, 5, 100])
def test_a_shard_cut_inside_its_header(sharded: Path, size: int) -> None:
    file = shard_of(sharded, SOME)
    os.truncate(file, size)
    assert f"{file} is truncated: {size} bytes" in refusal(sharded)


def test_a_shard_with_bytes_behind_its_tensors(sharded: Path) -> None:
    file = shard_of(sharded, SOME)
    with file.open("ab") as handle:
        handle.write(b"x")
    assert f"{file} is {file.stat().st_size} bytes long" in refusal(sharded)


def test_a_tensor_that_only_the_index_knows(sharded: Path) -> None:
    file = rewrite_shard(sharded, SOME, lambda tensors: tensors.pop(SOME))
    assert f"{file} lacks tensor {SOME}" in refusal(sharded)


def test_a_tensor_the_index_does_not_know(sharded: Path) -> None:
    extra = {"model.extra.weight": torch.zeros(2)}
    file = rewrite_shard(sharded, SOME, lambda tensors: tensors.update(extra))
    assert f"{file} holds tensor model.extra.weight" in refusal(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first = shard_of(sharded, "model.embed_tokens.weight")
    assert first != shard_of(sharded, SOME)
    file = rewrite_shard(
        sharded, SOME, lambda t: t.update({"model.embed_tokens.weight": torch.ones(1)})
    )
    message = refusal(sharded)
    assert "model.embed_tokens.weight" in message
    assert file.name in message
    assert first.name in message


def test_a_stray_shard(sharded: Path) -> None:
    save_file({"x": torch.zeros(1)}, sharded / "model-00099-of-00099.safetensors")
    assert "model-00099-of-00099.safetensors is not named in" in refusal(sharded)


def test_a_stray_file_beside_a_single_one(saved: Saved, tmp_path: Path) -> None:
    folder = shutil.copytree(saved("moe"), tmp_path / "m")
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert "consolidated.safetensors is not named in" in refusal(folder)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "model.bin", 7])
def test_an_index_that_points_elsewhere(sharded: Path, file: object) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"][SOME] = file
    (sharded / INDEX).write_text(json.dumps(index))
    message = refusal(sharded)
    assert SOME in message
    assert repr(file) in message


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"weight_map": {"a": "x", "a": "y"}}'])
def test_a_damaged_index(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert f"{sharded / INDEX} is damaged" in refusal(sharded)


def header_edited(file: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda entry: entry.update(dtype="F16"), "dtype F16; accepted: F32, BF16"),
        (lambda entry: entry.update(shape=[47, 32]), "needs 6016 bytes, has 6144"),
        (lambda entry: entry.update(shape=[-48, -32]), "has 6144"),
        (lambda entry: entry.pop("shape"), "header is damaged"),
        (lambda entry: entry.update(data_offsets="x"), "header is damaged"),
        (
            lambda entry: entry.update(data_offsets=[n + 4 for n in entry["data_offsets"]]),
            "begins at byte",
        ),
    ],
)
def test_a_damaged_header(sharded: Path, edit: Callable[[Any], Any], says: str) -> None:
    file = shard_of(sharded, SOME)
    header_edited(file, lambda header: edit(header[SOME]))
    message = refusal(sharded)
    assert str(file) in message
    assert says in message


def test_a_header_that_names_a_tensor_twice(sharded: Path) -> None:
    file = shard_of(sharded, SOME)
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    text = header[:-1] + b',"' + SOME.encode() + b'":{}}'
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    assert f"the key {SOME} occurs twice" in refusal(sharded)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    assert "neither model.safetensors nor" in refusal(tmp_path)


def test_a_file_cut_short_after_it_was_opened(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    os.truncate(shard_of(sharded, SOME), 10)
    with pytest.raises(DataError, match="cut short while open"):
        checkpoint.get(SOME)


def test_all_faults_of_a_folder_are_named_together(sharded: Path) -> None:
    """D4: of the index, of files and of tensors in one message, each thing once."""
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    absent, cut, renamed, lacking = files[:4]
    held = {file: [n for n, f in index["weight_map"].items() if f == file] for file in files}
    (sharded / absent).unlink()
    os.truncate(sharded / cut, (sharded / cut).stat().st_size - 1)
    misshapen, wrong_type = held[renamed][:2]
    header_edited(sharded / renamed, lambda header: header[misshapen].update(shape=[1, 1]))
    header_edited(sharded / renamed, lambda header: header[wrong_type].update(dtype="I64"))
    tensors = load_file(sharded / lacking)
    gone, new = held[lacking][0], "model.new.weight"
    tensors[new] = tensors.pop(gone)
    save_file(tensors, sharded / lacking)
    save_file({"x": torch.zeros(1)}, sharded / "stray.safetensors")
    elsewhere = held[files[4]][0]
    index["weight_map"] |= {elsewhere: "../x.safetensors"}
    (sharded / INDEX).write_text(json.dumps(index))

    expected = [
        f"tensor {elsewhere} lies in '../x.safetensors'",
        f"{sharded / 'stray.safetensors'} is not named",
        f"{sharded / absent} is missing; {INDEX} puts there: {', '.join(sorted(held[absent]))}",
        f"{sharded / cut} is truncated",
        f"tensor {misshapen} of shape [1, 1] needs 4 bytes",
        f"tensor {wrong_type} has dtype I64",
        f"{sharded / lacking} lacks tensor {gone}",
        f"{sharded / lacking} holds tensor {new}, but {INDEX} does not name it",
        f"{sharded / files[4]} holds tensor {elsewhere}, but {INDEX} puts it in ../x.safetensors",
    ]
    message = refusal(sharded)
    assert f"({len(expected)} faults)" in message
    for part in expected:
        assert part in message
    with pytest.raises(DataError) as error:  # and nothing is called missing besides
        open_model(sharded, read_spec(sharded))
    assert str(error.value) == message


def test_faults_of_files_and_of_the_model_are_named_together(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shard_of(sharded, SOME).unlink()
    norm = "model.norm.weight"
    file = rewrite_shard(sharded, norm, lambda t: t.update({"model.extra": t.pop(norm)}))
    index["weight_map"] |= {"model.extra": file.name}
    del index["weight_map"][norm]
    (sharded / INDEX).write_text(json.dumps(index))
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps({**config, "vocab_size": 51}))
    with pytest.raises(DataError) as error:
        open_model(sharded, read_spec(sharded))
    message = str(error.value)
    assert "(5 faults)" in message
    for part in (
        "is missing; ",
        f"missing {norm} [32]",
        "not part of the model: model.extra",
        "lm_head.weight: found [50, 32]; config.json implies [51, 32]",
        "model.embed_tokens.weight: found [50, 32]; config.json implies [51, 32]",
    ):
        assert part in message


def test_tensors_may_be_missing_by_name_only(saved: Saved, tmp_path: Path) -> None:
    gone = ["model.norm.weight", SOME]
    folder = edited_tensors(saved("moe"), tmp_path / "m", lambda t: [t.pop(n) for n in gone])
    spec = read_spec(folder)
    checkpoint = open_model(folder, spec, allow_missing=gone)
    check_complete(checkpoint, spec, allow_missing=gone)
    assert set(checkpoint.names()) == set(load_file(folder / "model.safetensors"))
    with pytest.raises(DataError, match=rf"1 fault\):\n  missing {SOME}"):
        open_model(folder, spec, allow_missing=gone[:1])
    with pytest.raises(DataError) as error:
        open_model(folder, spec, allow_missing=[*gone, "model.norm", "lm_head.weight"])
    assert "(2 faults)" in str(error.value)
    assert "model.norm may be missing, but the model has none" in str(error.value)
    assert "lm_head.weight may be missing, but is there" in str(error.value)


def test_a_tensor_whose_copy_is_there_is_not_missing(saved: Saved, tmp_path: Path) -> None:
    """Zeros would take the place of values that the folder has."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors[head] = tensors.pop(embedding)

    folder = edited_tensors(saved("dense_tied"), tmp_path / "m", rename)
    with pytest.raises(DataError, match=f"1 fault.*\n.*{embedding} may be missing, but {head}"):
        open_model(folder, read_spec(folder), allow_missing=[embedding])


def test_a_header_with_places_that_are_no_numbers(sharded: Path) -> None:
    file = shard_of(sharded, SOME)
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header[SOME]["data_offsets"][1] = float("inf")
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
    assert f"{file}: the header is damaged at tensor {SOME}" in refusal(sharded)


# ---- completeness --------------------------------------------------------------------------------


def edited_tensors(source: Path, out: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    folder = shutil.copytree(source, out)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def incompleteness(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        check_complete(open_checkpoint(folder), read_spec(folder))
    return str(error.value)


def test_missing_extra_and_misshapen_tensors_are_reported_together(
    saved: Saved, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.3.mlp.gate.weight"] = torch.zeros(6, 32)
        tensors["model.norm.weight"] = torch.zeros(31)

    message = incompleteness(edited_tensors(saved("moe"), tmp_path / "m", edit))
    assert "(3 faults)" in message
    assert "missing model.layers.2.mlp.experts.5.up_proj.weight [20, 32]" in message
    assert "not part of the model: model.layers.3.mlp.gate.weight" in message
    assert "model.norm.weight: found [31]; config.json implies [32]" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 4),
        ("num_hidden_layers", 2),
        ("num_local_experts", 8),
        ("num_key_value_heads", 2),
        ("head_dim", 12),
        ("vocab_size", 64),
        ("moe_intermediate_size", 40),
        ("tie_word_embeddings", True),
        ("mlp_only_layers", [1]),
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused(
    saved: Saved, tmp_path: Path, key: str, value: Any
) -> None:
    """D5, for every dimension that shows in a shape."""
    folder = shutil.copytree(saved("moe"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    assert incompleteness(folder)


def test_a_tied_model_may_store_an_equal_head_only(saved: Saved, tmp_path: Path) -> None:
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"

    def equal(tensors: dict[str, Tensor]) -> None:
        tensors[head] = tensors[embedding].clone()

    def stale(tensors: dict[str, Tensor]) -> None:
        tensors[head] = tensors[embedding].clone()
        tensors[head][3, 3] += 1e-3

    folder = edited_tensors(saved("dense_tied"), tmp_path / "equal", equal)
    check_complete(open_checkpoint(folder), read_spec(folder))
    message = incompleteness(edited_tensors(saved("dense_tied"), tmp_path / "stale", stale))
    assert "tie_word_embeddings is true, but lm_head.weight differs" in message
