"""Checkpoints on disk: what the safetensors library reads and writes, and whole or not at all."""

import json
import resource
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.errors import DataError
from megarl.models.hf_complete import check_complete
from megarl.models.hf_headers import INDEX
from megarl.models.hf_io import open_checkpoint
from megarl.models.hf_write import Entry, write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from megarl.types import TensorSpec

Saved = Callable[[str], Path]
BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"),
    *("tiktoken.model", "qwen.tiktoken", "LICENSE-MODEL", "README.md"),
    *("tokenizer.model.v3", "tokenizer.model.v7m1", "sentencepiece.bpe", "spiece.vocab"),
    "additional_chat_templates/tool_use.jinja",
)
LEFT = (
    "pytorch_model.bin",
    "a.model.bin",
    "pytorch_model.bin.index.json",
    ".secret.json",
    "original/params.json",
)
SHARD_BYTES = 20_000  # as in the fixture `sharded`


def load_all(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


@pytest.mark.parametrize("model", ["moe", "moe_bfloat16", "dense_tied"])
def test_what_transformers_wrote_is_read_bit_for_bit(saved: Saved, model: str) -> None:
    checkpoint = open_checkpoint(saved(model))
    expected = load_all(saved(model))
    assert same({name: checkpoint.get(name) for name in checkpoint.names()}, expected)
    assert {n: checkpoint.shape(n) for n in expected} == {n: t.shape for n, t in expected.items()}
    assert {checkpoint.dtype(n) for n in expected} == {t.dtype for t in expected.values()}


def test_a_slice_of_a_tensor_is_read_alone(saved: Saved, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(saved("moe"), folder)
    whole = load_all(folder)
    checkpoint = open_checkpoint(folder)
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        for index in (0, 3, len(whole[name]) - 1):
            part = checkpoint.get(name, index)
            assert torch.equal(part, whole[name][index]) and part.dtype == whole[name].dtype
    with (folder / "model.safetensors").open("r+b") as file:  # what lies behind is not touched
        last = max(checkpoint.names(), key=lambda n: checkpoint._place(n).end)
        file.truncate(checkpoint._place(last).begin + 2 * whole[last][0].nbytes)
    assert torch.equal(checkpoint.get(last, 1), whole[last][1])
    with pytest.raises(DataError, match=f"tensor {last} is incomplete"):
        checkpoint.get(last, 2)


@pytest.mark.parametrize("shape", [(7, 5), (4, 6, 3), (3, 4, 2, 5), (9,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_columns_are_those_of_the_whole(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"before": torch.ones(3), "x": tensor}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for low, high in ((0, shape[0]), (1, 3), (2, 2), (shape[0] - 1, shape[0])):
        assert torch.equal(checkpoint.get("x", rows=(low, high)), tensor[low:high])
    if len(shape) == 1:
        return
    for low, high in ((0, shape[1]), (1, 4), (3, 3), (shape[1] - 1, shape[1])):
        assert torch.equal(checkpoint.get("x", columns=(low, high)), tensor[:, low:high])
        part = checkpoint.get("x", rows=(1, 3), columns=(low, high))
        assert torch.equal(part, tensor[1:3, low:high]) and part.is_contiguous()
    if len(shape) > 2:
        part = checkpoint.get("x", 2, rows=(1, 3), columns=(0, 2))
        assert torch.equal(part, tensor[2, 1:3, :2])


def test_a_slice_of_a_huge_tensor_needs_its_own_memory_alone(tmp_path: Path) -> None:
    """1 TB on paper, a hole on disk, under a limit of address space that a map would break."""
    rows, columns = 2**20, 2**18
    entry = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, 4 * rows * columns]}
    text = json.dumps({"x": entry}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 4 * rows * columns)
        file.seek(8 + len(text) + 4 * (columns * (rows - 2) + columns - 1))
        file.write(np.float32(7.0).tobytes())
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, before[1]))
    try:
        checkpoint = open_checkpoint(tmp_path)
        column = checkpoint.get("x", rows=(rows - 4, rows), columns=(columns - 2, columns))
        row = checkpoint.get("x", rows=(rows - 2, rows - 1))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert column.tolist() == [[0, 0], [0, 0], [0, 7], [0, 0]]
    assert row.shape == (1, columns) and row.sum() == row[0, -1] == 7


def test_what_we_write_the_library_reads_bit_for_bit(saved: Saved, sharded: Path) -> None:
    assert len(list(sharded.glob("model-*-of-*.safetensors"))) > 3
    assert same(load_all(sharded), load_all(saved("moe")))
    index = json.loads((sharded / INDEX).read_text())
    for name, file in index["weight_map"].items():
        with safe_open(sharded / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118 (a method of safe_open)
            assert shard.metadata() == {"format": "pt"}
    total = sum(t.numel() * 4 for t in load_all(saved("moe")).values())
    assert index["metadata"]["total_size"] == total
    for file in set(index["weight_map"].values()):
        assert (sharded / file).stat().st_size < SHARD_BYTES + 8_000  # data and a header


def test_tensors_may_come_in_any_order(saved: Saved, sharded: Path, tmp_path: Path) -> None:
    """The same files, byte for byte, whatever order a pipeline of stages delivers in."""
    source = saved("moe")
    specs = mapping_for(read_spec(source)).hf_spec()
    backwards = reversed(list(load_all(source).items()))
    write_checkpoint(tmp_path / "back", backwards, specs, source, SHARD_BYTES)
    for file in sharded.iterdir():
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes(), file.name


ENTRIES = torch.arange(24.0).view(3, 2, 4)
STACKED = [TensorSpec("stacked", (3, 2, 4), "float32")]


def test_entries_of_a_tensor_may_come_one_by_one(saved: Saved, tmp_path: Path) -> None:
    out = tmp_path / "out"
    entries = [("stacked", Entry(i, ENTRIES[i])) for i in (2, 0, 1)]
    write_checkpoint(out, entries, STACKED, saved("moe"))
    assert torch.equal(load_file(out / "model.safetensors")["stacked"], ENTRIES)


@pytest.mark.parametrize(
    ("order", "named"),
    [
        ((2, 0), r"1 announced tensors never came whole: stacked \(16 of 24 values\)"),
        ((2, 2, 0, 1), "tensor stacked came twice"),
        ((0, 3), r"tensor stacked: found entry 3; announced \[3, 2, 4\]"),
        ((0, 1, 2, 0), "tensor stacked came twice"),
    ],
)
def test_entries_that_do_not_make_up_the_tensor_are_refused(
    saved: Saved, tmp_path: Path, order: tuple[int, ...], named: str
) -> None:
    entries = [("stacked", Entry(i, ENTRIES[min(i, 2)])) for i in order]
    with pytest.raises(DataError, match=named):
        write_checkpoint(tmp_path / "out", entries, STACKED, saved("moe"))
    assert not list(tmp_path.iterdir())


def test_a_model_below_the_limit_is_one_file(saved: Saved, tmp_path: Path) -> None:
    source = saved("dense_tied")
    specs = mapping_for(read_spec(source)).hf_spec()
    write_checkpoint(tmp_path / "out", load_all(source).items(), specs, source)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in source.iterdir()
    )
    assert same(load_all(tmp_path / "out"), load_all(source))
    check_complete(open_checkpoint(tmp_path / "out"), read_spec(tmp_path / "out"))


def test_writing_holds_one_tensor_at_a_time(saved: Saved, tmp_path: Path) -> None:
    source = saved("moe")
    specs = mapping_for(read_spec(source)).hf_spec()
    alive: list[weakref.ref[Tensor]] = []

    def one_by_one() -> Iterator[tuple[str, Tensor]]:
        for spec in specs:
            tensor = torch.zeros(spec.shape)
            alive.append(weakref.ref(tensor))
            yield spec.name, tensor
            del tensor
            assert sum(r() is not None for r in alive) <= 1

    write_checkpoint(tmp_path / "out", one_by_one(), specs, source, SHARD_BYTES)


def test_the_other_files_come_along(saved: Saved, tmp_path: Path) -> None:
    source = shutil.copytree(saved("moe_bfloat16"), tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    for name in BESIDE:
        (source / name).write_text(f"this is {name}")
    code = source / "modeling_custom.py"  # that would show if anything ran or imported it
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code.chmod(0o755)
    (source / "tokenization_linked.py").symlink_to(code)  # as a cache has its files
    for name in LEFT:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("weights")
    specs = mapping_for(read_spec(source)).hf_spec()
    write_checkpoint(tmp_path / "out", load_all(source).items(), specs, source)
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*.*")}
    code_files = {"modeling_custom.py", "tokenization_linked.py"}
    files = {*BESIDE, *code_files, "config.json", "generation_config.json", "model.safetensors"}
    assert found == files - {"LICENSE-MODEL"}
    for name in files - {"model.safetensors"}:
        copy = tmp_path / "out" / name
        assert copy.read_bytes() == (source / name).read_bytes()
        assert not copy.is_symlink() and not copy.stat().st_mode & 0o111
    assert not (tmp_path / "ran").exists()


def test_config_names_the_dtype_that_was_written(saved: Saved, tmp_path: Path) -> None:
    source = saved("moe_bfloat16")
    specs = mapping_for(read_spec(source)).hf_spec("float32")
    wide = ((name, tensor.float()) for name, tensor in load_all(source).items())
    write_checkpoint(tmp_path / "out", wide, specs, source)
    assert read_spec(source).dtype == "bfloat16"
    assert read_spec(tmp_path / "out").dtype == "float32"
    assert {t.dtype for t in load_all(tmp_path / "out").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda tensors: tensors[:-1], "1 announced tensors never came whole: lm_head"),
        (lambda tensors: [*tensors, tensors[0]], "came twice"),
        (lambda tensors: [*tensors, ("model.extra", torch.zeros(2))], "model.extra is not part"),
        (lambda tensors: [(n, t.bfloat16()) for n, t in tensors], "announced .* float32"),
        (lambda tensors: [(n, t[..., :-1]) for n, t in tensors], r"found \[.*announced \["),
    ],
)
def test_nothing_appears_unless_exactly_the_announced_tensors_came(
    saved: Saved, tmp_path: Path, fault: Callable[[Any], Any], says: str
) -> None:
    source = saved("moe")
    specs = mapping_for(read_spec(source)).hf_spec()
    loaded = load_all(source)
    tensors = [(spec.name, loaded[spec.name]) for spec in specs]
    with pytest.raises(DataError, match=says):
        write_checkpoint(tmp_path / "out", fault(tensors), specs, source)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_fails_midway_leaves_nothing(saved: Saved, tmp_path: Path) -> None:
    specs = mapping_for(read_spec(saved("moe"))).hf_spec()

    def interrupted() -> Iterator[tuple[str, Tensor]]:
        yield specs[0].name, torch.zeros(specs[0].shape)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "out", interrupted(), specs, saved("moe"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_not_overwritten(saved: Saved, sharded: Path) -> None:
    before = {p.name: p.read_bytes() for p in sharded.iterdir()}
    with pytest.raises(DataError, match="already exists"):
        write_checkpoint(sharded, iter(()), [], saved("moe"))
    assert {p.name: p.read_bytes() for p in sharded.iterdir()} == before


def test_announced_tensors_of_other_types_are_refused(tmp_path: Path) -> None:
    specs = [TensorSpec("a", (2,), "float16")]
    with pytest.raises(DataError, match="tensor a: dtype float16; accepted: float32, bfloat16"):
        write_checkpoint(tmp_path / "out", iter(()), specs, tmp_path)
