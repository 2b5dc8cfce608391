"""Weight groups between processes that share nothing else (gloo, loopback)."""

import json
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megarl.errors import SyncError
from megarl.sync.group import create_store, join_group, leave_group

pytestmark = pytest.mark.dist

# What a member process runs: JSON options in, one JSON object out.
MEMBER = """
import json, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
from megarl.sync.group import join_group, leave_group

opts = json.loads(sys.argv[1])
rank, result, failures = opts["rank"], {}, []
if opts["default_group"]:
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", opts["default_port"], is_master=False),
        rank=1 - rank, world_size=2, timeout=timedelta(seconds=60))
    # As when the default group was made with device_id=: its communicator must be left alone.
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    dist.distributed_c10d._get_split_source = lambda group: failures.append("split the default")

def through(name, value):
    group = join_group(opts["address"], rank=rank, world_size=2, group_name=name, backend="gloo",
                       timeout_s=60)
    tensor = torch.full((5,), value) if rank == 0 else torch.zeros(5)
    dist.broadcast(tensor, group_src=0, group=group)
    result[name] = [group.rank(), group.size(), tensor.tolist()]
    leave_group(group)

threads = [threading.Thread(target=through, args=item) for item in opts["groups"].items()]
for thread in threads if rank == 0 else reversed(threads):
    thread.start()
for thread in threads:
    thread.join()
if opts["default_group"]:
    if dist.group.WORLD.bound_device_id != torch.device("cuda", 0):
        failures.append("the default group's device is gone")
    dist.group.WORLD.bound_device_id = None
    one = torch.ones(1)
    dist.all_reduce(one)
    result["default"] = [dist.get_rank(), one.item()]
    dist.destroy_process_group()
print(json.dumps({"result": result, "failures": failures}))
"""


def start_member(**options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, json.dumps(options)], stdout=subprocess.PIPE, text=True
    )


def finish(members: list[subprocess.Popen[str]]) -> list[dict[str, list]]:
    try:
        outputs = [member.communicate(timeout=120)[0] for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()
    assert [member.returncode for member in members] == [0] * len(members)
    replies = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert [reply["failures"] for reply in replies] == [[]] * len(members)
    return [reply["result"] for reply in replies]


def two_members(*, groups: dict[str, float], default_group: bool) -> list[dict[str, list]]:
    store, port = create_store("127.0.0.1")
    default_store, default_port = create_store("127.0.0.1")
    members = [
        start_member(
            rank=rank,
            address=f"127.0.0.1:{port}",
            groups=groups,
            default_group=default_group,
            default_port=default_port,
        )
        for rank in (0, 1)
    ]
    results = finish(members)
    del store, default_store  # they had to live until here
    return results


def test_two_processes_join_broadcast_and_leave_beside_their_default_group():
    first, second = two_members(groups={"weights": 3.5}, default_group=True)
    assert first == {"weights": [0, 2, [3.5] * 5], "default": [1, 2.0]}
    assert second == {"weights": [1, 2, [3.5] * 5], "default": [0, 2.0]}


def test_two_groups_at_once_do_not_mix_and_need_no_default_group():
    for rank, result in enumerate(two_members(groups={"a": 1.0, "b": 2.0}, default_group=False)):
        assert result == {"a": [rank, 2, [1.0] * 5], "b": [rank, 2, [2.0] * 5]}


def test_a_member_that_never_joins_is_named_within_the_deadline():
    store, port = create_store("127.0.0.1")
    started = time.monotonic()
    with pytest.raises(SyncError) as failure:
        join_group(store, rank=0, world_size=3, group_name="stage-1", backend="gloo", timeout_s=1.0)
    assert time.monotonic() - started < 5
    for fact in ("'stage-1'", f"127.0.0.1:{port}", "1 s", "ranks 0..2", "missing 1, 2"):
        assert fact in str(failure.value)

    # One that comes after the others gave up finds nobody, and does not wait longer either.
    started = time.monotonic()
    with pytest.raises(SyncError, match="stage-1"):
        join_group(
            f"127.0.0.1:{port}",
            rank=1,
            world_size=3,
            group_name="stage-1",
            backend="gloo",
            timeout_s=1.0,
        )
    assert time.monotonic() - started < 5


def test_a_member_that_takes_its_time_is_waited_for():
    store, port = create_store("127.0.0.1")
    # Starting Python and torch takes seconds: the other rank is long waiting by then.
    member = start_member(
        rank=1, address=f"127.0.0.1:{port}", groups={"g": 0.0}, default_group=False
    )
    group = join_group(store, rank=0, world_size=2, group_name="g", backend="gloo", timeout_s=60.0)
    dist.broadcast(torch.full((5,), 7.0), group_src=0, group=group)
    assert finish([member]) == [{"g": [1, 2, [7.0] * 5]}]
    leave_group(group)


def test_nobody_at_the_address_is_an_error_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(SyncError, match=f"127.0.0.1:{port}"):
        join_group(
            f"tcp://127.0.0.1:{port}",
            rank=1,
            world_size=2,
            group_name="g",
            backend="gloo",
            timeout_s=1.0,
        )
    assert time.monotonic() - started < 5


def has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 on this machine")
def test_ipv6_hosts_are_taken_with_and_without_brackets():
    for host in ("[::1]", "::1"):
        store, port = create_store(host)
        group = join_group(
            f"[::1]:{port}", rank=0, world_size=1, group_name="six", backend="gloo", timeout_s=20.0
        )
        leave_group(group)
        assert store.host == "::1"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1:80", "host:port"])
def test_a_malformed_address_is_refused_with_the_accepted_form(address):
    with pytest.raises(SyncError, match=r"accepted: host:port, \[IPv6\]:port"):
        join_group(address, rank=0, world_size=1, group_name="g", backend="gloo", timeout_s=1.0)


def test_a_store_needs_an_address_of_this_machine_and_a_rank_its_group():
    with pytest.raises(SyncError, match=r"192\.0\.2\.1"):
        create_store("192.0.2.1")
    store, _ = create_store("127.0.0.1")
    with pytest.raises(SyncError, match=r"rank 2 is outside 0\.\.1"):
        join_group(store, rank=2, world_size=2, group_name="g", backend="gloo", timeout_s=1.0)
