"""Servers that die, hang or lie during a push to several: the others get everything, in time.

Real server processes; the trainer's ranks have weights of a file. What a server must hold is read
from that file.
"""

import contextlib
import itertools
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.sync.pushing import BOUND_S, Trainer
from tests.sync.servers import Rewrite, http, proxied
from tests.sync.test_broadcast import no_success
from tests.sync.watched import Blow

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("stages", "op", "nth", "later_s"),
    [
        (1, "begin", 1, 0.0),
        (2, "join_group", 0, 0.0),
        (1, "receive", 1, 0.0),
        (1, "receive", 1, 0.5),  # with a part of the bucket received
        (2, "digest", 1, 0.0),
        (1, "commit", 1, 0.0),
    ],
)
def test_one_of_three_dies_and_the_others_get_everything(
    trainer: Trainer, stages: int, op: str, nth: int, later_s: float
) -> None:
    """Then one that has taken its place gets the next push with them."""
    victim = trainer.servers[1]
    first = [0, 1, 2] if nth else [0, 2]
    blow = Blow(op, nth, victim.pid, later_s=later_s)
    pushes, seconds, seen = trainer.push(
        first, [0, 1, 2], [0, 2, 3], stages=stages, blows={str(victim.pid): blow}
    )
    assert [set(push.lost) for push in pushes] == [set(), {victim.name}, set()]
    reason = pushes[1].lost[victim.name]
    assert victim.url in reason or f"{victim.name}: {op}: " in reason
    if op == "receive":
        assert re.search(r"\(group megarl-\w+-rank0-\d, \d+ tensors from [\w.]+ on\)", reason)
    assert max(seconds) < BOUND_S
    assert [p.receipt.version for p in pushes if p.receipt is not None] == [1, 2, 3]
    assert [name for name, *_ in seen[str(victim.pid)]].count("commit") == nth
    for k in (0, 2, 3):
        trainer.serves(trainer.servers[k], 3)
    for k in (0, 2):  # over one group a stage, all the time; the version moves at commit alone
        operations = seen[str(trainer.servers[k].pid)]
        assert [name for name, *_ in operations].count("join_group") == stages
        moves = [(name, before, after) for name, before, after in operations if before != after]
        assert moves == [("commit", "0", "1"), ("commit", "1", "2"), ("commit", "2", "3")]


def test_one_that_hangs_in_the_middle_of_a_bucket_is_left_behind_at_the_deadline(
    trainer: Trainer,
) -> None:
    victim = trainer.servers[0]
    blow = Blow("receive", 1, victim.pid, signal.SIGSTOP)
    pushes, seconds, _ = trainer.push(
        [0, 1, 2], [0, 1, 2], [1, 2], deadline_s=2.0, blows={str(victim.pid): blow}
    )
    assert [set(push.lost) for push in pushes] == [set(), {victim.name}, set()]
    assert "did not end within 2 s" in pushes[1].lost[victim.name]
    assert seconds[1] < 2 * 2.0 + 1 and seconds[2] < 2
    for k in (1, 2):
        trainer.serves(trainer.servers[k], 3)


def test_all_die_and_those_that_take_their_place_get_the_next_push(trainer: Trainer) -> None:
    blows = {
        str(server.pid): Blow(op, 0, server.pid)
        for server, op in zip(trainer.servers, ("begin", "receive", "digest"), strict=False)
    }
    pushes, seconds, _ = trainer.push([0, 1, 2], [3], blows=blows)
    assert set(pushes[0].lost) == {"server 0", "server 1", "server 2"}
    assert pushes[0].receipt is None and pushes[1].lost == {}
    assert max(seconds) < BOUND_S
    trainer.serves(trainer.servers[3], 2)


RECEIVE = "/update_weights_from_distributed"


def late(body: dict[str, Any]) -> dict[str, Any]:
    time.sleep(6.0)
    return body


@pytest.mark.parametrize("nth", [0, 2])
def test_one_that_stands_still_in_a_shared_group_is_lost_alone(trainer: Trainer, nth: int) -> None:
    """All wait for it in vain, and their deadlines pass together."""
    victim = trainer.servers[nth]
    blow = Blow("receive", 0, victim.pid, signal.SIGSTOP)
    how = {"shared": True, "deadline_s": 2.0, "blows": {str(victim.pid): blow}}
    [push], [seconds], _ = trainer.push([0, 1, 2], world=1, **how)
    assert set(push.lost) == {victim.name} and seconds < BOUND_S
    for server in trainer.servers[:3]:
        if server is not victim:
            trainer.serves(server, 1)


@pytest.mark.parametrize(("times", "lost"), [(1, 0), (10**6, 1)])
def test_one_that_answers_and_never_comes_is_told_from_those_that_waited(
    trainer: Trainer, times: int, lost: int
) -> None:
    """Nobody refused and nobody is dead: each gets everything by itself. One that then comes is
    none the worse.
    """
    victim = trainer.servers[1]
    with proxied(replace(victim), RECEIVE, forge=late, times=times) as proxy:
        direct, victim.url = victim.url, proxy.url
        how = {"shared": True, "deadline_s": 2.0, "max_bytes": 2**26}
        [push], [seconds], _ = trainer.push([0, 1, 2], world=1, **how)
        victim.url = direct
    assert set(push.lost) == set([victim.name][:lost]) and seconds < BOUND_S
    for k in (0, 2):
        trainer.serves(trainer.servers[k], 1)


def test_servers_are_told_the_address_by_which_each_sees_the_trainer(trainer: Trainer) -> None:
    """In one group, though one of them is behind another interface."""
    told: list[str] = []

    def note(body: dict[str, Any]) -> dict[str, Any]:
        told.append(body["master_address"])
        return body

    first, second = trainer.servers[:2]
    with proxied(replace(second), "/init_weights_update_group", forge=note) as proxy:
        described = [first.described, {**second.described, "url": proxy.url}]
        described[1]["address"] = "127.0.0.2"
        pushes = [(1, trainer.file(1), [0, 1])]
        how = {"stages": 1, "servers": described, "pushes": pushes, "shared": True}
        [rank] = trainer.pool.run("tests.sync.work_push:push", world=1, **how)
    assert rank["steps"][0][1].lost == {} and told == ["127.0.0.2"]


def test_groups_of_trainers_that_were_killed_are_left_when_the_next_one_comes(
    trainer: Trainer,
) -> None:
    server = trainer.servers[0]
    open_files = []
    for _ in range(4):
        [push], _, _ = trainer.push([0], world=1, close=False)
        assert push.lost == {}
        open_files.append(len(os.listdir(f"/proc/{server.pid}/fd")))
    assert open_files[3] == open_files[2] == open_files[1]


@pytest.mark.parametrize(("stages", "senders"), [(2, 1), (1, 2)])
def test_one_that_refuses_costs_those_that_share_its_group_a_second_attempt(
    trainer: Trainer, stages: int, senders: int
) -> None:
    """As over NCCL, where all servers of a push share a group."""
    liar = trainer.servers[1]
    with proxied(replace(liar), RECEIVE, no_success) as proxy:
        direct, liar.url = liar.url, proxy.url
        pushes, seconds, seen = trainer.push(
            *([0, 1, 2], [0, 1, 2]),
            **{"shared": True, "stages": stages, "senders": senders, "max_bytes": 2**22},
        )
        liar.url = direct
    assert [set(push.lost) for push in pushes] == [{liar.name}, set()]
    assert "half written" in pushes[0].lost[liar.name]
    assert pushes[0].receipt is not None and pushes[0].receipt.tensors > 0
    assert max(seconds) < BOUND_S
    for server in trainer.servers[:3]:
        trainer.serves(server, 2)
    operations = [op for op, *_ in seen[str(trainer.servers[0].pid)]]
    assert operations.count("begin") == 3  # twice in the first push
    assert operations.count("commit") == 2


def failing(nth: int) -> Rewrite:
    """Refuses the nth of its weights, counted from 0."""
    count = itertools.count()
    return lambda status, reply: (
        no_success(status, reply) if next(count) == nth else (status, reply)
    )


def test_a_group_that_breaks_every_time_is_given_up(trainer: Trainer) -> None:
    """By another server each time; the last one has done nothing wrong, and samples nothing."""
    path = "/update_weights_from_distributed"
    trainer.servers[3].name = "server 3"
    with contextlib.ExitStack() as proxies:
        for nth, server in enumerate(trainer.servers[:3]):
            lying = proxied(replace(server), path, failing(nth), times=10**6)
            server.url = proxies.enter_context(lying).url
        [push], [seconds], _ = trainer.push([0, 1, 2, 3], shared=True)
    assert set(push.lost) == {"server 0", "server 1", "server 2", "server 3"}
    assert ["half written" in push.lost[f"server {k}"] for k in range(4)] == [True] * 3 + [False]
    assert "broke 3 times" in push.lost["server 3"] and push.receipt is None
    assert seconds < BOUND_S
    state = http(trainer.servers[3].url, trainer.servers[3].key, "/server_info")[1]
    assert (state["paused"], state["weight_version"]) == ("retract", "0")


def test_groups_last_while_their_servers_do_whoever_else_gets_a_push(trainer: Trainer) -> None:
    pushes, _, seen = trainer.push([0, 1], [2], [0, 1, 2], [], [0, 3], [0, 2, 3])
    assert [push.lost for push in pushes] == [{}] * 6
    assert [push.receipt is None for push in pushes] == [False] * 3 + [True] + [False] * 2
    for server in trainer.servers:
        operations = [op for op, *_ in seen[str(server.pid)]]
        assert operations.count("join_group") == 1
    for k in (0, 2, 3):
        trainer.serves(trainer.servers[k], 6)
    trainer.serves(trainer.servers[1], 3)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_trainer_that_fails_itself_fails_on_every_rank_and_servers_sample_nothing(
    trainer: Trainer, stages: int
) -> None:
    described = [server.described for server in trainer.servers[:2]]
    ranks = trainer.pool.run(
        "tests.sync.work_push:push",
        world=2,
        stages=stages,
        servers=described,
        pushes=[(1, trainer.file(1), [0, 1])],
        broken_rank=1,
    )
    for rank in ranks:
        error, push, seconds = rank["steps"][0]
        assert push is None and seconds < BOUND_S
        assert error[0] == "SyncError"
        assert "rank 1" in error[1] and "could not be gathered" in error[1]
    for server in trainer.servers[:2]:
        state = http(server.url, server.key, "/server_info")[1]
        assert (state["paused"], state["weight_version"]) == ("retract", "0")


def test_two_servers_of_one_name_are_refused(trainer: Trainer) -> None:
    described = [server.described for server in trainer.servers]
    [rank] = trainer.pool.run(
        "tests.sync.work_push:push",
        world=1,
        stages=1,
        servers=described,
        pushes=[(1, trainer.file(1), [1, 3])],
    )
    error = rank["steps"][0][0]
    assert error[0] == "SyncError" and "two servers of one name" in error[1]


def overlapping(status: int, reply: Any) -> tuple[int, Any]:
    return status, {**reply, "disable_overlap_schedule": False, "disable_radix_cache": False}


def test_a_server_that_would_name_versions_wrong_in_place_is_lost_before_it_is_paused(
    trainer: Trainer,
) -> None:
    """As SGLang says of itself where it overlaps steps."""
    server = trainer.servers[1]
    with proxied(replace(server), "/server_info", overlapping, times=10**6) as proxy:
        direct, server.url = server.url, proxy.url
        [push], _, _ = trainer.push([0, 1], pause_mode="in_place")
        server.url = direct
    assert set(push.lost) == {server.name}
    for flag in ("--disable-overlap-schedule", "--disable-radix-cache"):
        assert flag in push.lost[server.name]
    state = http(server.url, server.key, "/server_info")[1]
    assert (state["paused"], state["weight_version"]) == (None, "0")
    trainer.serves(trainer.servers[0], 1)


def test_weights_that_compute_nothing_are_5xx_until_better_ones_come(
    trainer: Trainer, tmp_path: Path
) -> None:
    """Never a wrong answer, and the server goes on."""
    broken = tmp_path / "broken.safetensors"
    tensors = load_file(trainer.file(1))
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], float("nan"))
    save_file(tensors, broken, metadata={"format": "pt"})
    server = trainer.servers[0]
    for version, file in ((1, broken), (2, trainer.file(2))):
        [rank] = trainer.pool.run(
            "tests.sync.work_push:push",
            world=1,
            stages=1,
            servers=[server.described],
            pushes=[(version, file, [0])],
        )
        assert rank["steps"][0][1].lost == {}
        if version == 1:
            status, reply = server.generate()
            assert status == 500 and "not finite" in reply["error"]["message"]
    trainer.serves(server, 2)
