"""A rank ends when it is told to, wherever its main thread is, and what depends on it ends before.

Every test runs a program of its own and sends it real signals. Lower bounds are exact promises;
upper ones allow a second for a busy machine.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT

SLACK_S = 1.0

START = """
import ctypes, os, sys, time
from pathlib import Path
from megarl.stopping import StopRequest

grace_s, out = float(sys.argv[1]), Path(sys.argv[2])

def say(word):
    with out.open("a") as file:
        file.write(word + "\\n")

stop = StopRequest(grace_s)
stop.on_end(lambda: say("ended"))
"""

# A mutex locked twice: the second lock waits in C for ever, and a signal does not interrupt it, so
# that Python never gets to run a handler.
WAIT_IN_C = """
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
say("waiting")
libc.pthread_mutex_lock(mutex)
say("woke up")
"""

POLL = """
say("waiting")
while not stop.requested:
    time.sleep(0.02)
say(f"requested while in {stop.where}")
stop.close()
sys.exit(stop.exit_code)
"""

GLOO = """
import torch, torch.distributed as dist
rank, store = int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if rank == 1:
    say("waiting")
    time.sleep(60)
say("waiting")
dist.all_reduce(torch.ones(1))
say("reduced")
"""


class Program:
    """A running program and the words it has said."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path) -> None:
        self.process, self.out = process, out

    @property
    def words(self) -> list[str]:
        return self.out.read_text().splitlines() if self.out.exists() else []

    def await_word(self, word: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while word not in self.words:
            assert self.process.poll() is None, (self.process.returncode, self.words)
            assert time.monotonic() < deadline, f"{word!r} was not said: {self.words}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> float:
        """When it was sent."""
        self.process.send_signal(number)
        return time.monotonic()

    def ended(self, since: float) -> tuple[int, float]:
        """(exit code, seconds after ``since``)."""
        code = self.process.wait(30)
        return code, time.monotonic() - since


@contextmanager
def program(
    source: str, out: Path, *, grace_s: float, more: tuple[str, ...] = ()
) -> Iterator[Program]:
    command = [sys.executable, "-c", START + source, str(grace_s), str(out), *more]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield Program(process, out)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_rank_that_waits_in_c_ends_after_the_grace(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with program(WAIT_IN_C, tmp_path / "out", grace_s=0.5) as rank:
        rank.await_word("waiting")
        found, seconds = rank.ended(rank.send(number))
        assert found == code
        assert 0.5 <= seconds < 0.5 + SLACK_S
        assert rank.words == ["waiting", "ended"]


@pytest.mark.dist
def test_a_rank_inside_a_collective_that_never_completes_ends_after_the_grace(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "store")
    with (
        program(GLOO, tmp_path / "zero", grace_s=0.5, more=("0", store)) as zero,
        program(GLOO, tmp_path / "one", grace_s=0.5, more=("1", store)) as one,
    ):
        one.await_word("waiting")
        zero.await_word("waiting")
        time.sleep(0.2)  # into the all-reduce, which rank 1 never reaches
        code, seconds = zero.ended(zero.send(signal.SIGTERM))
        assert code == 143
        assert 0.5 <= seconds < 0.5 + SLACK_S
        assert zero.words == ["waiting", "ended"]
        assert one.process.poll() is None


def test_a_second_signal_ends_a_rank_at_once(tmp_path: Path) -> None:
    with program(WAIT_IN_C, tmp_path / "out", grace_s=30.0) as rank:
        rank.await_word("waiting")
        rank.send(signal.SIGINT)
        time.sleep(0.3)
        assert rank.process.poll() is None  # the first one leaves it its grace
        code, seconds = rank.ended(rank.send(signal.SIGTERM))
        assert code == 143
        assert seconds < SLACK_S
        assert rank.words == ["waiting", "ended"]


def test_a_loop_that_asks_ends_by_itself_before_the_grace(tmp_path: Path) -> None:
    with program("stop.where = 'step 3'" + POLL, tmp_path / "out", grace_s=15.0) as rank:
        rank.await_word("waiting")
        code, seconds = rank.ended(rank.send(signal.SIGTERM))
        assert code == 143
        assert seconds < SLACK_S
        assert rank.words == ["waiting", "requested while in step 3", "ended"]


def test_the_end_by_itself_is_not_cut_short(tmp_path: Path) -> None:
    """A rank that is saving when the grace ends has been too slow; one that has closed has not."""
    source = POLL.replace("sys.exit", "time.sleep(0.8); say('saved'); sys.exit")
    with program(source, tmp_path / "out", grace_s=0.4) as rank:
        rank.await_word("waiting")
        code, _ = rank.ended(rank.send(signal.SIGTERM))
        assert code == 143
        assert rank.words[-2:] == ["ended", "saved"]


def test_signals_after_the_end_change_nothing(tmp_path: Path) -> None:
    source = "stop.close(); say('waiting'); time.sleep(0.6); say('done'); sys.exit(stop.exit_code)"
    with program(source, tmp_path / "out", grace_s=0.1) as rank:
        rank.await_word("waiting")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            sent = rank.send(number)
        assert rank.ended(sent)[0] == 0
        assert rank.words == ["ended", "waiting", "done"]


def test_a_rank_whose_server_died_ends_soon_with_that_failure(tmp_path: Path) -> None:
    with program("stop.fail(7, delay_s=0.5)" + WAIT_IN_C, tmp_path / "out", grace_s=30.0) as rank:
        rank.await_word("waiting")
        code, seconds = rank.ended(time.monotonic())
        assert code == 7
        assert seconds < 0.5 + SLACK_S
        assert rank.words == ["waiting", "ended"]


def test_a_failure_to_come_does_not_hold_up_or_change_an_end_that_comes_first(
    tmp_path: Path,
) -> None:
    source = "stop.fail(7, delay_s=30.0); stop.close(); say('done'); sys.exit(0)"
    with program(source, tmp_path / "out", grace_s=30.0) as rank:
        rank.await_word("done")
        code, seconds = rank.ended(time.monotonic())
        assert code == 0 and seconds < SLACK_S


def test_an_action_that_fails_does_not_keep_the_others_from_running(tmp_path: Path) -> None:
    source = "stop.on_end(lambda: 1 / 0); stop.on_end(lambda: say('last'))" + WAIT_IN_C
    with program(source, tmp_path / "out", grace_s=0.1) as rank:
        rank.await_word("waiting")
        assert rank.ended(rank.send(signal.SIGTERM))[0] == 143
        assert rank.words == ["waiting", "ended", "last"]
