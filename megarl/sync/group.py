"""Process groups that a trainer and rollout servers join together, outside the trainer's own world.

How two strangers become one group (the trainer's half of SGLang 0.5.23's
`/init_weights_update_group`):

1. One trainer process hosts a TCPStore (`create_store`) and tells every server its address and
   port.
2. All `world_size` members, each in its own process and at the same time, take a rank: the trainers
   first, then a server of tensor-parallel size n the n ranks from its `rank_offset` on.
3. Each puts the group's name before its keys in the store, and builds a process group there. The
   other half runs in SGLang, so prefix and constructor must stay the ones it uses
   (`init_custom_process_group` in its utils/common.py): a difference shows as a join that never
   completes.

The group is independent of the default process group, which may or may not exist, and in which this
process usually has another rank. So address members by `group_src=` and `group_dst=`, and take this
process's rank from `group.rank()`: `torch.distributed.get_rank(group)` would look up the other one.
"""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from megarl.errors import SyncError


def prefix_of(trainer: str) -> str:
    """How the names of all groups of one trainer begin; ``trainer``: letters and digits."""
    return f"megarl-{trainer}-"


def is_of_another(name: str, than: str) -> bool:
    """Whether two groups are of different trainers: one has died if a server is in both. Of names
    that no trainer of ours gives nobody knows.
    """
    prefixes = [re.match(prefix_of("[^-]+"), each) for each in (name, than)]
    return all(prefixes) and prefixes[0][0] != prefixes[1][0]  # type: ignore[index]


def create_store(host: str, *, timeout_s: float = 300.0) -> tuple[TCPStore, int]:
    """Hosts a store in this process on a port that the system chooses; returns (store, port).

    `host` is this machine as the other members see it: a name or an address, IPv6 with or without
    brackets. An address is listened on alone; a name on all interfaces, since a machine often
    resolves its own name to loopback. Keep the store for as long as its groups: NCCL connects late.

    Raises SyncError when `host` is not an address of this machine.
    """
    host = host.strip("[]")
    try:
        listener = _listen(host)
        port: int = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise SyncError(f"cannot host a store for weight groups on {host!r}: {error}") from error
    return store, port


def join_group(
    store: TCPStore | str,
    *,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str,
    timeout_s: float,
) -> dist.ProcessGroup:
    """Joins group `group_name` as `rank`; returns when every member is there.

    `store` is what `create_store` returned, or its address `host:port` in any other process than
    the one that hosts it. `timeout_s` bounds the joining and, after it, each of the group's
    collectives. NCCL connects at the first collective only: there, joining does not wait for the
    others. A name can be used once per store: after a failure, take a new store.

    Raises SyncError naming the group, its address and the ranks that did not come.
    """
    if not 0 <= rank < world_size:
        raise SyncError(f"group {group_name!r}: rank {rank} is outside 0..{world_size - 1}")
    host, port = _endpoint(store) if isinstance(store, str) else (store.host, store.port)
    timeout = timedelta(seconds=timeout_s)
    client: TCPStore | None = None
    try:
        # Its own connection, also where the store lives: a wait on a shared one stalls every user.
        client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        with _no_split_of_default_group():
            group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],  # not a subset of the default group
                c10d.Backend(backend),
                PrefixStore(group_name, client),
                group_name=c10d.GroupName(group_name),
                timeout=timeout,
            )
    except (RuntimeError, ValueError) as error:
        raise SyncError(
            f"weight group {group_name!r} at {_shown(host, port)} did not come together within "
            f"{timeout_s:g} s: this is rank {rank} ({backend}), ranks 0..{world_size - 1} were "
            f"expected{_missing(client, group_name, world_size)}: {error}"
        ) from error
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def leave_group(group: dist.ProcessGroup) -> None:
    """Closes this member's end of the group. Waits for nobody."""
    dist.destroy_process_group(group)


def abandon_group(group: dist.ProcessGroup, backend: str) -> None:
    """Closes this member's end of a group that is broken, whatever is under way in it: then the
    others' part of it fails, too. Over gloo that is when the last broadcast has ended or timed out;
    call it where nobody waits, and drop the group with it.
    """
    if backend == "nccl":
        c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def _listen(host: str) -> socket.socket:
    """A listening socket on a free port. The store takes it over as it is, so that nobody else can
    get the port in between."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET,
            dualstack_ipv6=socket.has_dualstack_ipv6(),
        )
    return socket.create_server((host, 0), family=family)


def _endpoint(address: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:tcp://)?(?:\[(.+)\]|([^:]+)):(\d+)", address)
    if match is None:
        raise SyncError(f"weight group store: found {address!r}; accepted: host:port, [IPv6]:port")
    return match[1] or match[2], int(match[3])


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def _no_split_of_default_group() -> Iterator[None]:
    """Hides the device that the default group is bound to. torch would otherwise make an NCCL group
    by splitting the default group's communicator, in which the servers have no part: a hang."""
    default = dist.group.WORLD
    if default is None or default.bound_device_id is None:
        yield
        return
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


def _missing(store: TCPStore | None, group_name: str, world_size: int) -> str:
    """Which ranks never came: gloo members announce themselves under <prefix>/.../<rank>."""
    present: set[int] = set()
    with contextlib.suppress(RuntimeError):  # the store itself may be what is gone
        keys = store.list_keys() if store is not None else []
        tails = [key.rsplit("/", 1)[-1] for key in keys if key.startswith(f"{group_name}/")]
        present = {int(tail) for tail in tails if tail.isdigit()}
    missing = sorted(set(range(world_size)) - present)
    if not present or not missing:
        return ""
    return f", missing {', '.join(map(str, missing))}"
