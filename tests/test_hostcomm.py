"""Host messages between two ranks: what arrives is what was sent, and a failure is everyone's."""

import json
import subprocess
import sys

import pytest

from tests.helpers.dist import WorkerPool

pytestmark = pytest.mark.dist

PAYLOADS = [b"", b"\0", b"text", bytes(range(256)) * 40, "ä€".encode()]


def test_broadcast_bytes_arrive_from_every_source_empty_ones_too(pool: WorkerPool) -> None:
    for seen in pool.run("tests.work_hostcomm:broadcasts", world=2, payloads=PAYLOADS):
        assert seen == [PAYLOADS, PAYLOADS]


def test_broadcast_json_is_the_value_of_the_source(pool: WorkerPool) -> None:
    values = [None, 0, -1.5, "", "ä\n", [], {}, {"a": [1, {"b": None}]}, [0.1, 1e300], True]
    for seen in pool.run("tests.work_hostcomm:broadcast_values", world=2, values=values):
        assert json.dumps(seen) == json.dumps(values)  # True is not 1


def test_gathered_bytes_come_in_rank_order_to_the_destination_alone(pool: WorkerPool) -> None:
    payloads = [[b"", b""], [b"a", b""], [b"", b"bcd"], [b"xyz", b"\0\1"], [b"n" * 9999, b"m"]]
    ranks = pool.run("tests.work_hostcomm:gathers", world=2, payloads=payloads)
    for rank, by_destination in enumerate(ranks):
        for dst, seen in enumerate(by_destination):
            assert seen == (payloads if rank == dst else [None] * len(payloads))


@pytest.mark.parametrize("world", [3, 4])
def test_bytes_gathered_through_other_ranks_come_in_rank_order(
    pool: WorkerPool, world: int
) -> None:
    """To every destination, of all ranks and of all but the first."""
    payloads = [bytes(range(rank, 7 * rank)) for rank in range(world)]  # none of rank 0
    ranks = pool.run("tests.work_hostcomm:gathers_of_groups", world=world, payloads=payloads)
    for rank, (everyone, others) in enumerate(ranks):
        for dst in range(world):
            assert everyone[dst] == (payloads if rank == dst else None)
            assert others.get(dst) == (payloads[1:] if 0 < rank == dst else None)


def test_ranks_hear_of_all_values_as_they_were_said(pool: WorkerPool) -> None:
    values = [{"rank": 0, "text": "ä"}, None, [1e300, -0.0, "\n"]]
    for seen in pool.run("tests.work_hostcomm:shared_values", world=3, values=values):
        assert json.dumps(seen) == json.dumps(values)


def test_gathered_values_come_in_rank_order(pool: WorkerPool) -> None:
    values = [{"rank": 0, "text": "ä"}, None]
    zero, one = pool.run("tests.work_hostcomm:gathered_values", world=2, values=values)
    assert zero == (None, values)
    assert one == (values, values)


def test_a_rank_may_open_as_many_files_as_its_system_allows() -> None:
    """In a process of its own, in which at most 300 may be opened, at first 20."""
    program = """
import os, resource
from megarl.hostcomm import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 300))
for _ in range(2):
    allow_connections()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 300)
print(max(os.open("/dev/null", os.O_RDONLY) for _ in range(200)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(ran.stdout) >= 200, ran.stderr


def test_a_flag_on_any_rank_is_seen_on_all(pool: WorkerPool) -> None:
    cases = [[False, False], [True, False], [False, True], [True, True]]
    for seen in pool.run("tests.work_hostcomm:flags", world=2, cases=cases):
        assert seen == [False, True, True, True]


def test_a_failure_raises_on_every_rank_with_the_words_of_the_one_that_failed(
    pool: WorkerPool,
) -> None:
    """Its own error there, a RunError naming rank and cause elsewhere; and the ranks stay in step:
    the agreement after a failed one works."""
    failing = [[], [1], [], [0], [0, 1], []]
    zero, one = pool.run("tests.work_hostcomm:agreements", world=2, failing=failing)
    own = [("DataError", f"disk {rank} is full") for rank in (0, 1)]
    told = [
        ("RunError", f"saving failed on rank {rank}: DataError: disk {rank} is full")
        for rank in (0, 1)
    ]
    assert zero == [None, told[1], None, own[0], own[0], None]
    assert one == [None, own[1], None, told[0], own[1], None]


def test_a_rank_that_fails_late_is_waited_for(pool: WorkerPool) -> None:
    (text, seconds), _ = pool.run(
        "tests.work_hostcomm:agreement_after_a_wait", world=2, seconds=0.3
    )
    assert text == "working failed on rank 1: DataError: late"
    assert 0.2 < seconds < 10
