"""How fast this machine does what a step of many samples consists of: one core, best of a few.

Used by ``simulate_scale.py``. Bytes a second unless the name says otherwise. What one process does
is timed by the seconds that its core worked, what goes between two by the clock. Processes on one
machine stand in for machines: gloo's messages go through the loopback device.
"""

import base64
import json
import mmap
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.hostcomm import broadcast_bytes
from megarl.ops.routing_codec import from_base64, narrow
from megarl.types import RoutingShape

_HOPS = 200


def measure(shape: RoutingShape, megabytes: int) -> dict[str, float]:
    """``shape``: of a model; ``megabytes``: that each measurement moves."""
    size = megabytes << 20
    return {
        "base64_and_narrow": _base64_and_narrow(shape, size),
        "memory_copy": _memory_copy(size),
        **_memfd(size),
        "json_parse": _json_parse(min(size, 8 << 20)),
        "local_socket": _local_socket(size),
        **_gloo(size),
    }


Clock = Callable[[], float]


def _best(
    do: Callable[[], Any], size: float, tries: int = 3, clock: Clock = time.process_time
) -> float:
    def seconds() -> float:
        start = clock()
        do()
        return clock() - start

    return size / min(seconds() for _ in range(tries))


def _base64_and_narrow(shape: RoutingShape, size: int) -> float:
    """Of base64: as a collector takes over the routed experts of a response of up to 8k tokens."""
    layers = len(shape.moe_layers)
    tokens = min(8192, max(1, size * 3 // 4 // (4 * layers * shape.topk)))
    order = np.random.default_rng(0).permuted(np.tile(np.arange(shape.experts), (64, 1)), axis=1)
    ids = np.resize(order[:, : shape.topk], (tokens, layers, shape.topk)).astype("<i4")
    text = base64.b64encode(ids.tobytes())

    def decode() -> None:
        flat = from_base64(text)
        narrow(flat.reshape(ids.shape)[:, list(shape.moe_layers)], shape.experts)

    return _best(decode, len(text))


def _memory_copy(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return _best(lambda: np.copyto(target, source), size)


def _memfd(size: int) -> dict[str, float]:
    """Written by a leader, read by another rank, in parts of a megabyte."""
    part, whole = np.ones(1 << 20, np.uint8), np.zeros(size, np.uint8)
    descriptor = os.memfd_create("megarl-scale")
    try:

        def write() -> None:
            os.lseek(descriptor, 0, os.SEEK_SET)
            for _ in range(size >> 20):
                os.write(descriptor, part.data)

        def read() -> None:
            with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as mapped:
                found = np.frombuffer(mapped, np.uint8)
                np.copyto(whole, found)
                del found  # a mapping that is looked at cannot be closed

        return {"memfd_write": _best(write, size), "memfd_read": _best(read, size)}
    finally:
        os.close(descriptor)


def _json_parse(size: int) -> float:
    """Of numbers as statistics of rows have them."""
    rng = np.random.default_rng(0)
    text = json.dumps(rng.random((size // 80, 4)).tolist())
    return _best(lambda: json.loads(text), len(text))


def _local_socket(size: int) -> float:
    """From another process, into memory that is there already."""
    here, there = socket.socketpair()
    child = os.fork()
    if not child:
        try:
            there.sendall(bytes(size))
        finally:
            os._exit(0)
    there.close()
    into, got = memoryview(bytearray(size)), 0
    got = here.recv_into(into)  # the child has started
    start, first = time.perf_counter(), got
    while got < size:
        got += here.recv_into(into[got:])
    seconds = time.perf_counter() - start
    here.close()
    os.waitpid(child, 0)
    return (size - first) / seconds


def _gloo(size: int) -> dict[str, float]:
    """Between two processes: bytes a second of a long message, seconds of a hop of a short one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    other = mp.spawn(_answer, (store.port, size), nprocs=1, join=False)
    try:
        return _talk(0, store, size)
    finally:
        other.join()


def _answer(_: int, port: int, size: int) -> None:
    torch.set_num_threads(1)
    _talk(1, dist.TCPStore("127.0.0.1", port, is_master=False), size)


def _talk(rank: int, store: dist.Store, size: int) -> dict[str, float]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    long, short = torch.zeros(size, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)

    def pass_on(message: torch.Tensor) -> None:
        for sender in (0, 1):
            if rank == sender:
                dist.send(message, 1 - rank)
            else:
                dist.recv(message, 1 - rank)

    try:
        pass_on(short)
        opened = len(os.listdir("/proc/self/fd"))
        dist.new_group(backend="gloo")
        descriptors = len(os.listdir("/proc/self/fd")) - opened
        wall, text = time.perf_counter, bytes(64)
        rate = _best(lambda: pass_on(long), 2 * size, clock=wall)
        hops = _best(lambda: [pass_on(short) for _ in range(_HOPS)], 2 * _HOPS, clock=wall)
        told = _best(lambda: [broadcast_bytes(text, 0, group) for _ in range(50)], 50, clock=wall)
    finally:
        dist.destroy_process_group()
    return {
        "gloo": rate,
        "gloo_hop_s": 1 / hops,
        "gloo_broadcast_of_two_s": 1 / told,
        "gloo_descriptors_of_a_group_of_two": float(descriptors),
    }
