"""Conversion in several processes and threads is conversion in one; who fails, fails for all."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.checkpoint.workers import LARGE, Item, Thread, Workers
from megarl.convert import Export, Import
from megarl.convert_display import _Lines, progress, show_mapping
from megarl.errors import DataError
from megarl.models.hf_headers import read_headers
from megarl.models.hf_io import open_checkpoint
from megarl.models.hf_write import HfWriter, write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.sharded import megatron_mapping
from megarl.models.spec import read_spec
from megarl.types import TensorSpec
from tests.helpers.dist import WorkerPool
from tests.helpers.families import save_model

WORK = "tests.checkpoint.work_convert:convert"
FAMILIES = ("qwen3_moe yarn", "deepseek_v3", "gpt_oss")  # experts stacked in the last


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In several files, of other names and another order than ours would have."""
    found = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp("plain")
        save_model(name, folder / "whole", torch.bfloat16)
        source = open_checkpoint(folder / "whole")
        specs = mapping_for(read_spec(folder / "whole")).hf_spec()
        tensors = ((spec.name, source.get(spec.name)) for spec in specs)
        write_checkpoint(folder / "parts", tensors, specs, folder / "whole", 60_000)
        rename(folder / "parts")
        found[name] = folder / "parts"
    return found


def rename(folder: Path) -> None:
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    names = {file: f"weights-{len(files) - i}.safetensors" for i, file in enumerate(files)}
    for file, name in names.items():
        (folder / file).rename(folder / name)
    index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    index_file.write_text(json.dumps(index, indent=2))


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.mark.dist
@pytest.mark.parametrize(("processes", "threads"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_there_and_back_is_every_file_of_the_folder(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, processes: int, threads: int
) -> None:
    """Bit for bit, index included, whoever did the work."""
    ways = []
    for name, hf in models.items():
        there, back = tmp_path / f"{name} there", tmp_path / f"{name} back"
        ways += [("import", hf, there), ("export", there, back)]
    said = pool.run(WORK, world=processes, ways=ways, threads=threads)
    assert said == [[None] * len(ways)] * processes
    for name, hf in models.items():
        assert contents(tmp_path / f"{name} back") == contents(hf), name
        there = tmp_path / f"{name} there"
        files = sorted(p.name for p in (there / "megatron").glob("*.distcp"))
        assert files == [f"__{p}_{t}.distcp" for p in range(processes) for t in range(threads)]
        assert sorted(p.name for p in there.iterdir()) == [
            *("digests.json", "files.json", "hf", "megatron", "model.json")
        ]
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.dist
@pytest.mark.parametrize("way", ["import", "export"])
@pytest.mark.parametrize("fails", [0, 1])
def test_where_one_process_fails_all_raise_and_nothing_appears(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, way: str, fails: int
) -> None:
    source = models["deepseek_v3"]
    if way == "export":
        Import(source).run(tmp_path / "there", Workers())
        source = tmp_path / "there"
    ways = [(way, source, tmp_path / "out")]
    said = pool.run(WORK, world=2, ways=ways, threads=2, fails=fails)
    assert said[fails] == ["OSError: [Errno 28] No space left on device"]
    why = f"rank {fails}: OSError: [Errno 28] No space left on device"
    assert said[1 - fails] == [f"RunError: writing weights failed on {why}"]
    assert [p.name for p in tmp_path.iterdir()] == (["there"] if way == "export" else [])
    assert pool.run(WORK, world=2, ways=ways, threads=1) == [[None], [None]]  # begun again


KILLED = """
import os, sys, time
from pathlib import Path
from megarl.checkpoint.workers import workers_of_launch
from megarl.convert import Import
from megarl.errors import RunError

def advance(num_bytes):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)

with workers_of_launch(2, advance, timeout_s=20) as workers:
    try:
        Import(Path(sys.argv[1])).run(Path(sys.argv[2]), workers)
    except RunError as e:
        print(e)
        sys.exit(3)
"""


def test_a_process_that_is_killed_is_named_and_nothing_appears(
    models: dict[str, Path], tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it is there already
    command = [sys.executable, "-c", KILLED, models["qwen3_moe yarn"], tmp_path / "out"]
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen([*map(str, command)], env={**os.environ, **env, "RANK": str(r)}, **given)
        for r in range(2)
    ]
    try:
        said, _ = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (ranks[0].returncode, ranks[1].returncode) == (3, -9), said
    assert said.startswith("writing weights: process 1 has ended or does not answer (")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/tmp/a.safetensors", "a.bin", "", 5, None, ["a.safetensors"]]
)
def test_files_that_a_checkpoint_names_are_its_folders(tmp_path: Path, file: Any) -> None:
    specs = [TensorSpec("a", (2,), "float32")]
    with pytest.raises(DataError, match="cannot be in"):
        HfWriter(tmp_path, specs, files={"a": file})


@pytest.mark.dist
def test_what_was_written_is_verified_by_all_together(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path
) -> None:
    hf, there, back = models["deepseek_v3"], tmp_path / "there", tmp_path / "back"
    Import(hf).run(there, Workers())
    Export(there).run(back, Workers())
    given = {"checkpoint": there, "folder": back}
    work = "tests.checkpoint.work_convert:verify"
    first, second = pool.run(work, world=2, threads=2, **given)
    count = len(open_checkpoint(hf).names())
    assert first[0] == f"verified: {count} tensors, read back, are those of the source"
    assert first[1].startswith("verified: ") and "those of the checkpoint" in first[1]
    # one value of each, wherever they are read
    digests = json.loads((there / "digests.json").read_text())
    name = "model.layers.3.mlp.experts.2.down_proj.weight"
    digests["tensors"][name]["digest"] = "0" * 16
    (there / "digests.json").write_text(json.dumps(digests))
    place = read_headers(back).places[name]
    with place.file.open("r+b") as file:
        file.seek(place.begin)
        byte = file.read(1)
        file.seek(place.begin)
        file.write(bytes([byte[0] ^ 1]))
    first, second = pool.run(work, world=2, threads=1, **given)
    assert f"1 of {count} tensors are not what was imported:\n  {name}: digest" in first[0]
    assert "1 of" in first[1] and "local_experts.2.linear_fc2.weight: digest" in first[1]
    assert all("verifying failed on rank 0" in said for said in second)


# --- how work is shared ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_item_has_one_process_and_all_have_about_as_much(size: int) -> None:
    items = [Item(str(k), 10 + (k * 7919) % 90) for k in range(200)] + [Item("large", 2000)]
    shares = [Workers(rank, size).share(items) for rank in range(size)]
    assert sorted(i.name for s in shares for i in s) == sorted(i.name for i in items)
    loads = [sum(i.num_bytes for i in share) for share in shares]
    assert max(loads) - min(loads) <= 2000


def test_large_parameters_share_one_place_and_small_ones_have_a_place_a_thread() -> None:
    """Whatever threads do at once, memory is one large place and a small one each."""
    threads, at_once, most, places = 4, 0, 0, set()
    lock = threading.Lock()
    together = threading.Barrier(threads)

    def do(item: Item, thread: Thread) -> None:
        nonlocal at_once, most
        with thread.memory((item.num_bytes,), torch.uint8) as memory:
            assert memory.shape == (item.num_bytes,) and memory.is_contiguous()
            with lock:
                places.add((item.num_bytes > LARGE, memory.data_ptr()))
                at_once += item.num_bytes > LARGE
                most = max(most, at_once)
            if item.num_bytes <= LARGE:
                together.wait(20)
            with lock:
                at_once -= item.num_bytes > LARGE

    items = [Item(f"small {k}", 100) for k in range(8)] + [
        Item(f"{k}", LARGE + 1) for k in range(6)
    ]
    Workers(threads=threads).run(items, do)
    assert most == 1
    assert sum(large for large, _ in places) == 1 and len(places) == 1 + threads


def test_the_first_error_ends_the_work() -> None:
    begun: list[str] = []

    def do(item: Item, thread: Thread) -> None:
        begun.append(item.name)
        raise DataError(f"bad {item.name}")

    with pytest.raises(DataError, match="bad"):
        Workers(threads=3).run([Item(str(k), 1) for k in range(1000)], do)
    assert len(begun) <= 3


@pytest.mark.parametrize("at", ["between two items", "while others end"])
def test_a_signal_ends_the_work_of_every_thread(at: str) -> None:
    """Wherever the first thread is then; nothing is begun after, nothing left half done."""
    main, begun, done = threading.get_ident(), list[str](), list[str]()
    others, told = threading.Event(), threading.Event()

    class Items(list[Item]):
        """The first thread is hit when it takes its second item."""

        def __iter__(self) -> Iterator[Item]:
            self.left = super().__iter__()
            return self

        def __next__(self) -> Item:
            if threading.get_ident() == main and others.is_set():
                told.set()
                raise SystemExit(143)
            return next(self.left)

    def do(item: Item, thread: Thread) -> None:
        begun.append(item.name)
        if threading.get_ident() == main:
            others.wait(20)
        else:
            others.set()
            assert told.wait(20)
            time.sleep(0.2)
        done.append(item.name)

    def stop() -> None:
        told.set()
        sys.exit(143)

    items: Sequence[Item] = Items(Item(str(k), 1) for k in range(20))
    if at == "while others end":
        items = items[:2]
        handler = signal.signal(signal.SIGALRM, lambda *_: stop())
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(SystemExit):
            Workers(threads=2).run(items, do)
    finally:
        if at == "while others end":
            signal.signal(signal.SIGALRM, handler)
    assert sorted(begun) == sorted(done) and 1 <= len(begun) <= 2


# --- what may be missing, what is shown -----------------------------------------------------------


def test_only_named_tensors_may_be_missing_and_they_become_zeros(
    models: dict[str, Path], tmp_path: Path
) -> None:
    hf = models["deepseek_v3"]
    source = open_checkpoint(hf)
    gone = [n for n in source.names() if n.endswith("e_score_correction_bias")]
    gone.append("model.layers.2.mlp.experts.1.up_proj.weight")
    assert len(gone) > 2
    specs = [s for s in mapping_for(read_spec(hf)).hf_spec() if s.name not in gone]
    write_checkpoint(tmp_path / "less", ((s.name, source.get(s.name)) for s in specs), specs, hf)
    with pytest.raises(DataError) as error:
        Import(tmp_path / "less", gone[1:])
    assert f"missing {gone[0]}" in str(error.value) and "1 fault" in str(error.value)
    for wrong in ("model.layers.0.mlp.gate.nothing", "model.norm.weight"):
        with pytest.raises(DataError, match=wrong):
            Import(tmp_path / "less", [*gone, wrong])
    Import(tmp_path / "less", gone).run(tmp_path / "there", Workers())
    Export(tmp_path / "there").run(tmp_path / "back", Workers())
    back = open_checkpoint(tmp_path / "back")
    for name in source.names():
        expected = source.get(name) * 0 if name in gone else source.get(name)
        assert torch.equal(back.get(name), expected), name


def test_the_mapping_table_has_every_parameter_and_the_bytes_of_the_files(
    models: dict[str, Path],
) -> None:
    for hf in models.values():
        out = io.StringIO()
        show_mapping(megatron_mapping(read_spec(hf)), 2, out)
        text = out.getvalue()
        for spec in mapping_for(read_spec(hf)).hf_spec():
            layers = spec.name.split(".layers.")
            if len(layers) == 1 or layers[1].startswith("0."):
                plain = spec.name.replace(".experts.1.", ".experts.0.")
                assert plain.split(".experts.")[0] in text, spec.name
        assert "process 0: " in text and "process 1: " in text
        config = json.loads((hf / "config.json").read_text())
        last = config["num_hidden_layers"] - 1
        assert f"L 0-{last}" in text or f"L 1-{last}" in text


def test_progress_on_a_terminal_shows_a_path_as_it_is() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with progress("writing a[/b] [red]c", 100, out) as advance:
        advance(100)
    assert "writing a[/b] [red]c" in out.getvalue()


def test_plain_progress_has_bytes_rate_and_what_is_left() -> None:
    now, out = [0.0], io.StringIO()
    lines = _Lines("writing out", 10 * 10**9, out, lambda: now[0])
    for _ in range(5):
        now[0] += 4
        lines.advance(10**9)
    assert out.getvalue().splitlines() == [
        "writing out: 3.0 of 10.0 GB, 250 MB/s, 28 s left",
    ]
