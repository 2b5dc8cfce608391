"""A pool of worker processes for multi-rank tests: Megatron is imported once a worker, not once a
test.

``pool.run("tests.actor.work:function", world=2, layout=..., ...)`` calls ``function(rank=...,
**arguments)`` on ``world`` workers inside a fresh gloo process group and returns the results in
rank order. A worker that raises, dies or does not answer in time fails the call with what it said;
the pool then starts afresh. So it does when a worker has many threads: groups that outlive their
test have one each, and a system has only so many. Workers end with the pool, or with the process
that owns it.
"""

import ctypes
import datetime
import functools
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_MOST_THREADS = 1000


class WorkerPool:
    """``env``: what workers have in their environment besides this process's own. ``first``: a
    module that they import before anything else.
    """

    def __init__(self, first: str = "torch", **env: str) -> None:
        self._first, self._env = first, env
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._tasks = 0

    def run(
        self, target: str, *, world: int, timeout_s: float = 120.0, **arguments: Any
    ) -> list[Any]:
        if any(_threads(process) > _MOST_THREADS for process, _ in self._workers):
            self.close()
        self._start(world)
        self._tasks += 1
        for rank in range(world):
            _, pipe = self._workers[rank]
            pipe.send(
                (target, self._store.port, f"task{self._tasks}", rank, world, timeout_s, arguments)
            )
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        pending = {self._workers[rank][1]: rank for rank in range(world)}
        failure = None
        while pending and failure is None:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failure = f"ranks {sorted(pending.values())} did not answer within {timeout_s:g} s"
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[call-overload]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the worker died"
                if not ok:
                    failure = f"rank {rank}: {value}"
                results[rank] = value
        if failure is not None:
            self.close()
            raise AssertionError(f"{target} with {arguments}: {failure}")
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()
        for process, _ in self._workers:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()

    def _start(self, world: int) -> None:
        while len(self._workers) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(there, os.getpid(), self._first), daemon=True
            )
            with mock.patch.dict(os.environ, self._env):
                process.start()
            there.close()
            self._workers.append((process, here))


def _threads(process: BaseProcess) -> int:
    try:
        return len(os.listdir(f"/proc/{process.pid}/task"))
    except FileNotFoundError:  # it has died, which the next task will say
        return 0


_DEVICE = functools.cache(lambda: dist.ProcessGroupGloo.create_device(interface="lo"))


class _OnOneDevice(dist.ProcessGroupGloo):
    """Every group of a worker on one gloo device.

    A device has a thread that wakes a hundred times a second. Some groups outlive their test
    (Megatron's gradient hooks refer to them): with a device each, a worker that has run fifty
    layouts spends most of a core on waking up.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        **later: Any,  # what torch 2.14 asks for besides: nothing of it by default
    ) -> None:
        assert not any(later.values()), later
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [_DEVICE()], 1, timeout
        super().__init__(store, rank, size, options)


def _serve(pipe: Connection, parent: int, first: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the pool's owner
    if os.getppid() != parent:
        return
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = _OnOneDevice  # type: ignore[misc]
    while True:
        try:
            target, port, task, rank, world, timeout_s, arguments = pipe.recv()
        except EOFError:
            return
        try:
            importlib.import_module(first)
            timeout = datetime.timedelta(seconds=timeout_s)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(task, store),
                rank=rank,
                world_size=world,
                timeout=timeout,
            )
            module, _, function = target.partition(":")
            value = getattr(importlib.import_module(module), function)(rank=rank, **arguments)
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
