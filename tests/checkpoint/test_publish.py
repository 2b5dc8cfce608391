"""A folder that is being made appears whole or not at all, whatever ends its making."""

import fcntl
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.publish import publish
from megarl.checkpoint.workers import Workers
from megarl.errors import DataError, RunError

ALONE = Workers()
SLOW = """
import sys, time
from pathlib import Path
from megarl.checkpoint.publish import publish
from megarl.checkpoint.workers import Workers

def write(folder):
    (folder / "half").write_bytes(b"h")
    print("writing", flush=True)
    time.sleep(60)

publish(Path(sys.argv[1]), Workers(), 1, write)
"""


def write_one(folder: Path) -> None:
    assert folder.is_dir() and not list(folder.iterdir())
    (folder / "weights").write_bytes(b"w")


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_it_appears_when_it_is_whole(tmp_path: Path, there: str) -> None:
    out = tmp_path / "a" / "b"
    if there != "nothing":
        out.mkdir(parents=True)

    def write(folder: Path) -> None:
        write_one(folder)
        assert not out.exists() or not list(out.iterdir())

    publish(out, ALONE, 1, write)
    assert (out / "weights").read_bytes() == b"w" and names(out.parent) == ["b"]


@pytest.mark.parametrize("error", [ValueError("damaged"), KeyboardInterrupt(), MemoryError()])
def test_what_fails_leaves_nothing_and_can_be_done_again(
    tmp_path: Path, error: BaseException
) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"h")
        raise error

    with pytest.raises(type(error)):
        publish(tmp_path / "out", ALONE, 1, fail)
    assert names(tmp_path) == []
    publish(tmp_path / "out", ALONE, 1, write_one)
    assert names(tmp_path) == ["out"]


def test_what_is_there_is_never_written_over(tmp_path: Path) -> None:
    out, file = tmp_path / "out", tmp_path / "file"
    publish(out, ALONE, 1, write_one)
    file.write_bytes(b"mine")
    for place in (out, file):
        with pytest.raises(DataError, match=rf"{place} already exists"):
            publish(place, ALONE, 1, write_one)
    assert names(tmp_path) == ["file", "out"] and file.read_bytes() == b"mine"


def test_a_disk_that_cannot_hold_it_is_found_before(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"out needs 1000000000\.00 GB, .* has .* GB free"):
        publish(tmp_path / "out", ALONE, 10**18, write_one)
    assert names(tmp_path) == []


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_two_at_once_are_refused_and_a_killed_one_is_begun_again(
    tmp_path: Path, end: signal.Signals
) -> None:
    out = tmp_path / "out"
    first = subprocess.Popen([sys.executable, "-c", SLOW, str(out)], stdout=subprocess.PIPE)
    try:
        assert first.stdout is not None and first.stdout.readline() == b"writing\n"
        with pytest.raises(DataError, match=rf"{out} is being written by another"):
            publish(out, ALONE, 1, write_one)
        assert not out.exists()
    finally:
        first.send_signal(end)
        first.communicate(timeout=20)
    assert not out.exists()
    publish(out, ALONE, 1, write_one)
    assert names(out) == ["weights"] and names(tmp_path) == ["out"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path: Path, there: bool) -> None:
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    (real if there else real.parent).mkdir(parents=True)
    link.symlink_to(real)
    publish(link, ALONE, 1, write_one)
    assert names(real) == ["weights"] and names(real.parent) == ["real"]
    assert link.is_symlink() and names(tmp_path) == ["disk", "link"]


def test_the_current_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    publish(Path("."), ALONE, 1, write_one)
    assert names(tmp_path / "out") == ["weights"] and names(tmp_path) == ["out"]


def test_places_where_nothing_can_be_made_are_found_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for place in (tmp_path / "file" / "out", tmp_path / ("x" * 250)):
        with pytest.raises(DataError, match=rf"{place} cannot be made: "):
            publish(place, ALONE, 1, write_one)
    with pytest.raises(DataError, match="/ already exists"):
        publish(Path("/"), ALONE, 1, write_one)
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(DataError, match="out is where a disk is mounted"):
        publish(tmp_path / "out", ALONE, 1, write_one)
    assert names(tmp_path) == ["file"]


def test_what_has_come_to_be_there_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write(folder: Path) -> None:
        write_one(folder)
        out.mkdir()
        (out / "mine").write_bytes(b"mine")

    with pytest.raises(DataError, match="out cannot be made: Directory not empty; was it made"):
        publish(out, ALONE, 1, write)
    assert names(out) == ["mine"] and names(tmp_path) == ["out"]


def test_a_lock_file_of_one_that_has_ended_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between another's opening and locking of its file, and a third takes a new one."""
    lock, flock = tmp_path / ".out.lock", fcntl.flock

    def late(handle: int, how: int) -> None:
        lock.unlink()
        lock.write_bytes(b"third")
        (tmp_path / ".out.part").mkdir()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(DataError, match="out is being written by another"):
        publish(tmp_path / "out", ALONE, 1, write_one)
    assert names(tmp_path) == [".out.lock", ".out.part"] and lock.read_bytes() == b"third"


def test_where_processes_do_not_meet_after_preparing_nothing_stays(tmp_path: Path) -> None:
    class Lost(Workers):
        def first(self, what: str, do: Callable[[], Any]) -> Any:
            do()
            raise RunError("process 1 has ended")

    with pytest.raises(RunError, match="process 1 has ended"):
        publish(tmp_path / "out", Lost(), 1, write_one)
    assert names(tmp_path) == []
