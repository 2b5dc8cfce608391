"""Versions in a shared folder: whole or not there, whatever stops whoever makes them."""

import errno
import fcntl
import json
import resource
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import SyncError
from megarl.models.published import MANIFEST, is_read, reading
from megarl.ops import digest
from megarl.sync.disk import Disk
from megarl.sync.packing import Packer
from megarl.sync.stream import pieces
from megarl.sync.version_folders import Publisher

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """What lies beside the weights of a model, and files that are no part of it."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "m", "torch_dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"old": torch.zeros(2)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def weights(seed: int) -> Tensors:
    made = torch.Generator().manual_seed(seed)
    return {
        f"layers.{k}.weight": torch.randn(3, k + 1, generator=made).to(dtype)
        for k, dtype in enumerate([torch.float32, torch.bfloat16] * 3)
    } | {"codes": torch.randn(4, 4, generator=made).to(torch.float8_e4m3fn)}


class Run:
    """Two senders, of which the first is rank 0's."""

    def __init__(self, folder: Path, served: Path, name: str = "r", timeout_s: float = 0.5) -> None:
        self.publisher = Publisher(folder, served)
        about = {"run": name, "timeout_s": timeout_s}
        self.senders = [
            Disk(folder, label="rank0", publisher=self.publisher, **about),
            Disk(folder, label="rank1", **about),
        ]
        self.attempts = 0

    def send(self, tensors: Tensors, max_bytes: int = 64) -> dict[str, str]:
        self.attempts += 1
        for sender in self.senders:
            sender.open([], self.attempts)
        for k, sender in enumerate(self.senders):
            mine = pieces([item] for item in list(tensors.items())[k::2])
            for bucket in Packer(max_bytes, CPU, allocate=sender.buffer).pack(mine):
                sender.send(bucket, set())
        return {name: digest(tensor) for name, tensor in tensors.items()}

    def publish(self, version: int, tensors: Tensors) -> None:
        self.senders[0].finish(version, self.send(tensors), [])

    def close(self) -> None:
        for sender in self.senders:
            sender.close()


@pytest.fixture
def fp8_served(served: Path) -> Path:
    config = {"model_type": "m", "quantization_config": {"quant_method": "fp8"}}
    (served / "config.json").write_text(json.dumps(config))
    return served


@pytest.fixture
def run(folder: Path, fp8_served: Path) -> Iterator[Run]:
    run = Run(folder, fp8_served)
    yield run
    run.close()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_version_is_a_hugging_face_folder_with_exactly_what_was_sent(
    run: Run, folder: Path
) -> None:
    """Read by the library, not by our own reader."""
    sent = weights(1)
    run.publish(7, sent)
    version = folder / "version_7"
    index = json.loads((version / "model.safetensors.index.json").read_text())
    files = {path.name for path in version.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 2
    found: Tensors = {}
    for file in files:
        held = load_file(version / file)
        assert {index["weight_map"][name] for name in held} == {file}
        assert not found.keys() & held.keys()
        found |= held
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in sent.values())
    told = json.loads((version / MANIFEST).read_text())
    assert told["digests"] == {name: digest(tensor) for name, tensor in sent.items()}
    config = json.loads((version / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "fp8"}
    assert (version / "tokenizer.json").read_text() == "{}"
    assert names(folder) == {"version_7", ".megarl-lock"}


def test_data_of_files_begins_where_readers_can_map_it(run: Run, folder: Path) -> None:
    run.publish(1, weights(1))
    for file in (folder / "version_1").glob("*.safetensors"):
        (length,) = struct.unpack("<Q", file.read_bytes()[:8])
        assert (8 + length) % 8 == 0


def test_the_last_two_versions_stay_and_what_somebody_reads(run: Run, folder: Path) -> None:
    (folder / "version_9").mkdir()  # not one of ours: no digests in it
    (folder / "version_old").mkdir()
    others = {"version_9", "version_old", ".megarl-lock"}
    run.publish(1, weights(1))
    with reading(folder / "version_1"):
        for version in (2, 3, 4):
            run.publish(version, weights(version))
        assert names(folder) == others | {"version_1", "version_3", "version_4"}
        assert is_read(folder / "version_1") and not is_read(folder / "version_3")
    run.publish(5, weights(5))
    assert names(folder) == others | {"version_4", "version_5"}


def test_an_earlier_runs_versions_are_replaced_and_its_litter_removed(
    folder: Path, fp8_served: Path
) -> None:
    """Both as a run leaves them that was killed: a version beyond the checkpoint that the next one
    goes on from, and half of another.
    """
    first = Run(folder, fp8_served, "one")
    first.publish(4, weights(4))
    first.publish(5, weights(5))
    first.send(weights(6))
    first.publisher.close()  # as its end does
    assert any(name.startswith(".megarl-staging-") for name in names(folder))
    second = Run(folder, fp8_served, "two")
    assert names(folder) == {"version_4", "version_5", ".megarl-lock"}
    second.publish(4, weights(40))
    second.close()
    assert names(folder) == {"version_4", ".megarl-lock"}
    [codes] = [f for f in (folder / "version_4").glob("*.safetensors") if "codes" in load_file(f)]
    expected = weights(40)["codes"].view(torch.uint8)
    assert torch.equal(load_file(codes)["codes"].view(torch.uint8), expected)


KILLED = """
import sys, time
from pathlib import Path
from tests.sync.test_disk import Run, weights
run = Run(Path(sys.argv[1]), Path(sys.argv[2]), "killed")
run.publish(1, weights(1))
run.send(weights(2))
print("half written", flush=True)
time.sleep(60)
"""


def test_a_run_that_is_killed_leaves_what_is_whole_and_the_next_one_goes_on(
    folder: Path, fp8_served: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(folder), str(fp8_served)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "half written\n"
    with pytest.raises(SyncError, match=f"another run writes there .pid {process.pid} on "):
        Publisher(folder, fp8_served)
    process.kill()
    process.wait()
    assert len([name for name in names(folder) if name.startswith(".megarl-staging-")]) == 1
    run = Run(folder, fp8_served)
    assert names(folder) == {"version_1", ".megarl-lock"}
    run.publish(2, weights(2))
    run.close()


def test_a_folder_that_a_live_run_writes_to_is_refused_to_another(
    run: Run, folder: Path, served: Path
) -> None:
    with pytest.raises(SyncError, match=r"weights: another run writes there \(pid \d+ on "):
        Publisher(folder, served)
    run.close()
    Publisher(folder, served).close()


def test_what_is_staged_is_published_only_if_it_is_what_was_sent(run: Run, folder: Path) -> None:
    def refused(digests: dict[str, str]) -> str:
        with pytest.raises(SyncError) as caught:
            run.senders[0].finish(3, digests, [])
        assert not (folder / "version_3").exists()
        return str(caught.value)

    digests = run.send(weights(1))
    assert "1 tensors are missing ['ghost']" in refused({**digests, "ghost": "0" * 16})
    codes = digests.pop("codes")
    assert "1 were not sent ['codes']" in refused(digests)
    run.senders[0].finish(3, {**digests, "codes": codes}, [])
    run.send(weights(2))
    staged = next(folder.glob(".megarl-staging-*"))
    file = next(staged.glob("*.safetensors"))
    shutil.copy(file, staged / "model-rank9-00001.safetensors")
    run.senders[0]._published = None
    with pytest.raises(SyncError, match="was sent twice: in "):
        run.senders[0].finish(4, {**digests, "codes": codes}, [])


def test_a_disk_that_takes_no_more_is_the_trainers_error_and_names_the_folder(
    run: Run, folder: Path
) -> None:
    """Here through a limit on the size of files."""
    run.publish(1, weights(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(SyncError, match=r"sync.folder .*weights: cannot be written to: File"):
            run.send(weights(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    run.close()
    assert names(folder) == {"version_1", ".megarl-lock"}


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, served: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match=r"sync.folder .*file/weights: cannot be written to: Not a"):
        Publisher(tmp_path / "file" / "weights", served)


def test_another_attempt_begins_with_nothing(run: Run, folder: Path) -> None:
    run.send(weights(1))
    digests = run.send({"only": torch.ones(3)})
    run.senders[0].finish(1, digests, [])
    assert names(folder) == {"version_1", ".megarl-lock"}
    [file] = (folder / "version_1").glob("*.safetensors")
    assert load_file(file).keys() == {"only"}


def test_a_reader_that_holds_no_lock_counts_as_none(run: Run, folder: Path) -> None:
    run.publish(1, weights(1))
    version = folder / "version_1"
    with (version / MANIFEST).open("rb") as manifest:
        assert not is_read(version)
        fcntl.flock(manifest, fcntl.LOCK_SH)
        assert is_read(version)
    assert not is_read(version) and not is_read(folder / "version_2")


def test_a_file_that_is_listed_late_is_waited_for(folder: Path, fp8_served: Path) -> None:
    """As another machine's may be, which was there all along."""
    run = Run(folder, fp8_served, timeout_s=60.0)
    digests = run.send(weights(1))
    [staged] = folder.glob(".megarl-staging-*")
    file = sorted(staged.glob("model-rank1-*"))[-1]
    hidden = file.replace(folder / "hidden")
    shown = threading.Timer(0.3, hidden.replace, [file])
    shown.start()
    run.senders[0].finish(1, digests, [])
    shown.join()
    version = folder / "version_1"
    found = {name for file in version.glob("*.safetensors") for name in load_file(file)}
    assert found == digests.keys()
    index = json.loads((version / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == digests.keys()
    run.close()


def as_nfs_does(handle: IO[bytes], how: int) -> None:
    """flock(2) over NFS: a lock of the bytes by ``fcntl``, which for an exclusive one wants a
    descriptor that may be written to. Those of open files, as these conflict inside a process, too.
    """
    kind = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK}[how & ~fcntl.LOCK_NB]
    asked = struct.pack("hhqqi4x", kind, 0, 0, 0, 0)
    fcntl.fcntl(handle, fcntl.F_OFD_SETLK, asked)


def test_a_lease_holds_where_flock_is_emulated_as_over_nfs(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(1, weights(1))
    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    version = folder / "version_1"
    with reading(version):
        assert is_read(version)
        with reading(version):
            assert is_read(version)
    assert not is_read(version)


@pytest.mark.parametrize("code", [errno.EBADF, errno.ENOLCK, errno.EACCES, errno.EOPNOTSUPP])
def test_what_cannot_be_locked_may_be_read_and_stays(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for version in (1, 2):
        run.publish(version, weights(version))

    def refuse(handle: Any, how: int) -> None:
        raise OSError(code, "no")

    with monkeypatch.context() as locks:
        locks.setattr(fcntl, "flock", refuse)
        assert is_read(folder / "version_1") and not is_read(folder / "version_9")
        run.publish(3, weights(3))
    assert names(folder) == {f"version_{k}" for k in (1, 2, 3)} | {".megarl-lock"}
    run.publish(4, weights(4))
    assert names(folder) == {"version_3", "version_4", ".megarl-lock"}


def test_a_file_that_cannot_be_written_to_is_locked_through_what_can_be_read(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, or on a file system that is mounted to be read; root may write to any."""
    run.publish(1, weights(1))
    version, open_file = folder / "version_1", Path.open

    def read_only(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "+" in mode:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_file(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", read_only)
    assert not is_read(version)
    with reading(version):
        assert is_read(version)
    monkeypatch.setattr(fcntl, "flock", as_nfs_does)
    assert is_read(version)  # nobody knows
