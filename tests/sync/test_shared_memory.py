"""Memory that another process on this machine reads, and only that memory."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import SyncError
from megarl.sync.packing import Packer
from megarl.sync.shared_memory import Maps, Place, SharedMemory
from megarl.sync.stream import pieces

OWNER = """
import sys, dataclasses, json, torch
from megarl.sync.shared_memory import SharedMemory
shared = SharedMemory()
flat = shared.buffer(1 << 20)
flat.copy_(torch.arange(1 << 20) % 251)
print(json.dumps(dataclasses.asdict(shared.place(flat))), flush=True)
for line in sys.stdin:
    flat.fill_(int(line))
    print("done", flush=True)
"""


class Owner:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self.process = process
        self.place = Place(**json.loads(process.stdout.readline()))

    def fill(self, value: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{value}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    command = [sys.executable, "-c", OWNER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    yield Owner(process)
    process.kill()
    process.wait()


def test_what_one_process_writes_another_reads_without_a_copy_of_its_own(owner: Owner) -> None:
    maps = Maps()
    seen = maps.read(owner.place)
    assert torch.equal(seen, (torch.arange(1 << 20) % 251).to(torch.uint8))
    owner.fill(7)
    assert maps.read(owner.place) is seen and bool((seen == 7).all())


def test_a_reader_can_neither_write_nor_resize_it(owner: Owner) -> None:
    path = f"/proc/{owner.place.pid}/fd/{owner.place.descriptor}"
    maps = Maps()
    maps.read(owner.place)
    lines = Path("/proc/self/maps").read_text().splitlines()
    [ours] = [line for line in lines if line.split()[4] == str(owner.place.inode)]
    assert ours.split()[1] == "r--s"
    handle = os.open(path, os.O_RDWR)
    for size in (0, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(handle, size)
    os.close(handle)


def test_it_has_no_name_and_is_gone_with_the_last_that_has_it() -> None:
    """Whatever ends its owner: nothing but the two processes ever had it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    dying = Owner(process)
    maps = Maps()
    seen = maps.read(dying.place)
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "memfd:" in mapped and "/dev/shm" not in mapped
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert int(seen[300]) == 49  # a reader that is at it is not disturbed
    with pytest.raises(SyncError, match="cannot be opened"):
        Maps().read(dying.place)


def other(place: Place, **changes: Any) -> str:
    with pytest.raises(SyncError) as caught:
        Maps().read(dataclasses.replace(place, **changes))
    return str(caught.value)


def test_what_is_not_the_memory_that_was_told_of_is_refused_in_words(
    owner: Owner, tmp_path: Path
) -> None:
    place = owner.place
    assert "on another machine" in other(place, machine="0f-0f")
    assert "share its process numbers" in other(place, descriptor=9999)
    assert "share its process numbers" in other(place, pid=2**22 - 1)
    for change in ({"inode": place.inode + 1}, {"device": place.device + 1}, {"num_bytes": 9}):
        assert "is not the trainer's memory" in other(place, **change)
    mine = {"pid": os.getpid()}
    secret = tmp_path / "secret"
    secret.write_text("of another kind")
    listening = socket.create_server(("127.0.0.1", 0))
    with secret.open() as file, Path("/dev/zero").open() as device, listening as listener:
        for handle in (file.fileno(), device.fileno()):
            about = os.fstat(handle)
            told = {"device": about.st_dev, "inode": about.st_ino, "num_bytes": about.st_size}
            assert "seals 0" in other(place, **mine, descriptor=handle, **told)
        assert "cannot be opened" in other(place, **mine, descriptor=listener.fileno())
    with contextlib.closing(os.fdopen(os.memfd_create("x"), "r+b")) as unsealed:
        unsealed.truncate(64)
        about = os.fstat(unsealed.fileno())
        told = {"device": about.st_dev, "inode": about.st_ino, "num_bytes": 64}
        assert "seals" in other(place, **mine, descriptor=unsealed.fileno(), **told)


@pytest.mark.parametrize(
    "wrong", [None, [], {}, {"pid": 1}, {"pid": "1"}, {"more": 1}, {"num_bytes": True}]
)
def test_a_place_that_is_none_is_refused(owner: Owner, wrong: Any) -> None:
    whole = dataclasses.asdict(owner.place)
    found = {**whole, **wrong} if wrong and "pid" not in wrong else wrong
    with pytest.raises(SyncError, match=r"place: found .*; accepted: an object of"):
        Place.of_json(found)
    assert Place.of_json(whole) == owner.place


def test_pieces_of_memory_are_told_apart_and_given_back_with_their_tensors() -> None:
    shared = SharedMemory()
    first, second = shared.buffer(5), shared.buffer(1 << 20)
    places = [shared.place(first[:3]), shared.place(second)]
    assert [place.num_bytes for place in places] == [5, 1 << 20]
    second.fill_(9)
    assert bool((Maps().read(places[1]) == 9).all())
    assert bool((Maps().read(places[0]) == 0).all())
    del first
    assert "cannot be opened" in other(places[0]) or "is not the trainer's" in other(places[0])
    assert bool((Maps().read(places[1]) == 9).all())


def mapped() -> list[str]:
    """Of the memory of pushes that this process maps: inodes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[4] for line in lines if "memfd:megarl-weights" in line]


def test_a_reader_keeps_the_last_two_pieces_of_each_owner(owner: Owner) -> None:
    """Buckets that are too large for the sender's buffers each come in memory of their own, which
    lives as long as a reader has it. Another sender's is not given up for them.
    """
    shared, maps, before = SharedMemory(), Maps(), set(mapped())
    theirs = maps.read(owner.place)
    large = ([(f"w{k}", torch.full((2**16,), k))] for k in range(6))
    for bucket in Packer(2**12, torch.device("cpu"), allocate=shared.buffer).pack(pieces(large)):
        place = Place(**shared.message(bucket, None)["place"])  # type: ignore[arg-type]
        assert torch.equal(maps.read(place)[: bucket.flat.numel()], bucket.flat)
        del bucket
        # its own and the reader's of two, and the one of the other owner
        assert len(set(mapped()) - before) <= 3 and len(mapped()) <= len(before) + 5
    assert maps.read(owner.place) is theirs
    maps.forget()
    del theirs
    assert set(mapped()) <= before | {str(place.inode)}


def test_two_buffers_that_take_turns_are_mapped_once() -> None:
    shared, maps = SharedMemory(), Maps()
    buffers = [shared.buffer(4096), shared.buffer(4096)]
    first = [maps.read(shared.place(buffer)) for buffer in buffers]
    for turn in (0, 1, 0, 0, 1, 1):
        assert maps.read(shared.place(buffers[turn])) is first[turn]
