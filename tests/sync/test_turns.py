"""Turns of senders, as threads that share a store."""

import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from megarl.errors import SyncError
from megarl.sync.turns import Turns


def test_one_at_a_time_and_everyone_in_the_end() -> None:
    store, inside, most, done = HashStore(), [], [], []

    def sender(name: int) -> None:
        turns = Turns(store, 30.0)
        turns.begin("1")
        for _ in range(5):
            with turns() as whole:
                inside.append(name)
                most.append(len(inside))
                time.sleep(0.002)
                inside.remove(name)
                done.append((name, whole))

    threads = [threading.Thread(target=sender, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1] * 20
    assert sorted(done) == [(name, True) for name in range(4) for _ in range(5)]


def test_who_came_first_is_served_first() -> None:
    store, order = HashStore(), []
    turns = [Turns(store, 30.0) for _ in range(4)]

    def sender(k: int) -> None:
        with turns[k]():
            order.append(k)

    threads = [threading.Thread(target=sender, args=(k,)) for k in (2, 0, 3)]
    with turns[1]():
        for taken, thread in enumerate(threads, start=2):
            thread.start()
            while store.add("turns/taken", 0) < taken:
                time.sleep(0.001)
    for thread in threads:
        thread.join(30)
    assert order == [2, 0, 3]


def test_a_turn_that_failed_is_told_to_all_until_the_next_round() -> None:
    store = HashStore()
    one, other = Turns(store, 5.0), Turns(store, 5.0)
    for turns in (one, other):
        turns.begin("1")
    with one() as whole:
        assert whole
        one.fail()
    with other() as whole:
        assert not whole
    for turns in (one, other):
        turns.begin("2")
    with other() as whole:
        assert whole


def test_an_error_ends_a_turn() -> None:
    store = HashStore()
    with pytest.raises(ValueError, match="mine"), Turns(store, 5.0)():
        raise ValueError("mine")
    with Turns(store, 0.1)() as whole:
        assert whole


def test_a_turn_that_does_not_end_is_not_waited_for_for_ever() -> None:
    store = HashStore()
    late = pytest.raises(SyncError, match=r"1 other senders had their turn.*within 0\.2 s")
    with Turns(store, 5.0)(), late, Turns(store, 0.2)():
        raise AssertionError("not its turn")
