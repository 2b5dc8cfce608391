"""Buckets that are written while others are received: order, buffers, and late failures."""

import threading
from collections.abc import Iterator

import pytest
import torch

from megarl.errors import SyncError
from megarl.sync.late_writes import LateWrites

SIZE = 64
WAIT_S = 30.0


class Gate:
    """A write that copies what its buffer holds when it is let through."""

    def __init__(self, flat: torch.Tensor, log: list[int]) -> None:
        self.flat, self.log, self.open = flat, log, threading.Event()

    def __call__(self) -> None:
        assert self.open.wait(WAIT_S)
        self.log.append(int(self.flat[0]))


@pytest.fixture
def late() -> Iterator[LateWrites]:
    writes = LateWrites()
    yield writes
    writes.begin()


def test_one_buffer_is_filled_while_the_other_is_written_from(late: LateWrites) -> None:
    log: list[int] = []
    flat = late.buffer(SIZE).fill_(1)
    first = Gate(flat, log)
    late.write(first, "the first")
    other = late.buffer(SIZE // 2).fill_(2)  # at once
    assert other.numel() == SIZE // 2 and (flat == 1).all() and log == []
    threading.Timer(0.2, first.open.set).start()
    second = Gate(other, log)
    late.write(second, "the second")
    third = late.buffer(SIZE).fill_(3)  # once the first is written
    assert log == [1] and (other == 2).all() and third.data_ptr() == flat.data_ptr()
    second.open.set()
    late.settle()
    assert log == [1, 2]


def test_writes_are_made_in_the_order_in_which_they_came(late: LateWrites) -> None:
    log: list[int] = []
    for k in range(50):
        write = Gate(late.buffer(SIZE).fill_(k), log)
        write.open.set()
        late.write(write, str(k))
    late.settle()
    assert log == list(range(50))


def test_after_one_that_failed_nothing_is_written_and_everything_raises(late: LateWrites) -> None:
    log: list[int] = []
    gate = threading.Event()

    def fails() -> None:
        assert gate.wait(WAIT_S)
        raise RuntimeError("the memory is full")

    late.buffer(SIZE)
    late.write(fails, "3 tensors from a on")
    behind = Gate(late.buffer(SIZE), log)
    behind.open.set()
    late.write(behind, "the next")
    gate.set()
    for call in (late.settle, lambda: late.buffer(SIZE), lambda: late.write(behind, "b")) * 2:
        with pytest.raises(SyncError, match=r"3 tensors from a on could not be .*memory is full"):
            call()
    late.rest()  # who wants no news
    assert log == []
    late.begin()
    behind.flat = late.buffer(SIZE).fill_(4)
    late.write(behind, "another")
    late.settle()
    assert log == [4]
