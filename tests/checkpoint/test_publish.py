"""A folder that is being made appears whole or not at all, whatever ends its making."""

import signal
import subprocess
import sys
from pathlib import Path

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
