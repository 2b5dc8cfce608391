"""Buckets that are received and written beside each other: buffers, exclusion, and failures."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
import torch

from megarl.errors import SyncError
from megarl.sync.arrivals import Arrivals

SIZE = 64
WAIT_S = 30.0


class Bucket:
    """Of one number; comes, and is written, when it is let."""

    def __init__(self, number: int, log: list[int]) -> None:
        self.number, self.log = number, log
        self.comes, self.may_be_written = threading.Event(), threading.Event()
        self.writing = threading.Event()

    def __call__(self, flat: torch.Tensor) -> Callable[[], None]:
        assert self.comes.wait(WAIT_S)
        flat.fill_(self.number)

        def write() -> None:
            self.writing.set()
            assert self.may_be_written.wait(WAIT_S)
            assert (flat == self.number).all()
            self.log.append(self.number)

        return write

    def let(self) -> "Bucket":
        self.comes.set()
        self.may_be_written.set()
        return self


@pytest.fixture
def arrivals() -> Iterator[Arrivals]:
    made = Arrivals()
    yield made
    made.begin()


def test_two_come_at_once_and_the_one_that_is_there_first_is_written_first(
    arrivals: Arrivals,
) -> None:
    log: list[int] = []
    slow, quick = Bucket(1, log), Bucket(2, log).let()
    coming = arrivals.take(SIZE, slow, "slow")
    arrivals.take(SIZE // 2, quick, "quick").result(WAIT_S)
    assert quick.writing.wait(WAIT_S) and not coming.done()
    slow.let()
    coming.result(WAIT_S)
    arrivals.settle()
    assert log == [2, 1]


def test_one_is_written_at_a_time(arrivals: Arrivals) -> None:
    log: list[int] = []
    first, second = Bucket(1, log), Bucket(2, log)
    first.comes.set()
    arrivals.take(SIZE, first, "first").result(WAIT_S)
    assert first.writing.wait(WAIT_S)
    arrivals.take(SIZE, second.let(), "second").result(WAIT_S)
    assert not second.writing.wait(0.2)
    first.may_be_written.set()
    arrivals.settle()
    assert log == [1, 2]


def test_a_third_waits_until_one_is_written_and_has_its_buffer(arrivals: Arrivals) -> None:
    log: list[int] = []
    flats: list[int] = []
    first, second = Bucket(1, log), Bucket(2, log)
    first.comes.set(), second.comes.set()
    for bucket in (first, second):
        arrivals.take(SIZE, bucket, "one of two").result(WAIT_S)
    third: list[Future[None]] = []

    def receive(flat: torch.Tensor) -> Callable[[], None]:
        flats.append(flat.numel())
        return lambda: log.append(int(flat.fill_(3)[0]))

    waits = threading.Thread(target=lambda: third.append(arrivals.take(2 * SIZE, receive, "3")))
    waits.start()
    waits.join(0.2)
    assert waits.is_alive() and log == []
    first.may_be_written.set()
    waits.join(WAIT_S)
    third[0].result(WAIT_S)
    second.may_be_written.set()
    arrivals.settle()
    assert sorted(log) == [1, 2, 3] and flats == [2 * SIZE]


def test_one_that_does_not_come_says_why_and_leaves_its_buffer(arrivals: Arrivals) -> None:
    log: list[int] = []

    def never(flat: torch.Tensor) -> Callable[[], None]:
        raise SyncError("the sender is gone")

    for _ in range(3):
        with pytest.raises(SyncError, match="the sender is gone"):
            arrivals.take(SIZE, never, "a").result(WAIT_S)
    arrivals.settle()  # nothing was written wrongly
    arrivals.take(SIZE, Bucket(4, log).let(), "b").result(WAIT_S)
    arrivals.settle()
    assert log == [4]


def test_after_one_that_could_not_be_written_nothing_is_and_everything_raises(
    arrivals: Arrivals,
) -> None:
    log: list[int] = []
    gate = threading.Event()

    def fails() -> None:
        assert gate.wait(WAIT_S)
        raise RuntimeError("the memory is full")

    arrivals.take(SIZE, lambda flat: fails, "3 tensors from a on").result(WAIT_S)
    behind = Bucket(1, log).let()
    arrivals.take(SIZE, behind, "the next").result(WAIT_S)
    gate.set()
    for call in (arrivals.settle, lambda: arrivals.take(SIZE, behind, "b")) * 2:
        with pytest.raises(SyncError, match=r"3 tensors from a on could not be .*memory is full"):
            call()
    arrivals.rest()  # who wants no news
    assert log == []
    arrivals.begin()
    arrivals.take(SIZE, Bucket(4, log).let(), "another").result(WAIT_S)
    arrivals.settle()
    assert log == [4]
