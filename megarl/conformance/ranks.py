"""Processes that talk over gloo, for the cases that are split over context-parallel ranks.

They start with the first such case, serve all of a file, and end with ``close``. Every wait has a
deadline; after a failure the processes are ended and the next case starts new ones.
"""

import datetime
import importlib
import json
import logging
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megarl.errors import MegarlError

DEADLINE_S = 120.0


_GRACE_S = 2.0  # for the other ranks to say what they know of a failure


class RanksError(MegarlError):
    """A rank failed, died or did not answer."""


class Ranks:
    """``work``: "module:function" of a job (JSON) and the ranks' process group -> JSON."""

    def __init__(self, work: str, deadline_s: float = DEADLINE_S) -> None:
        self._work, self._deadline_s = work, deadline_s
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store: TCPStore | None = None
        self._jobs = 0

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, world: int, job: Any) -> list[Any]:
        """What each of ``world`` ranks makes of the job, in rank order. Raises RanksError."""
        try:
            return self._run(world, job)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[BaseProcess]:
        return [process for process, _ in self._workers]

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
        self._store = None

    def _run(self, world: int, job: Any) -> list[Any]:
        port = self._start(world)
        self._jobs += 1
        header = {"port": port, "name": f"job{self._jobs}", "world": world, "job": job}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world])}
        for pipe, rank in pipes.items():
            pipe.send_bytes(json.dumps({**header, "rank": rank}).encode())
        answers: dict[int, Any] = {}
        end = time.monotonic() + self._deadline_s
        while len(answers) < world:
            waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in waiting:
                if pipe in ready:
                    answers[pipes[pipe]] = answer = self._answer(pipe)
                    if answer["error"] is not None:  # another rank may know the cause
                        end = min(end, time.monotonic() + _GRACE_S)
        errors = [f"rank {r}: {a['error']}" for r, a in sorted(answers.items()) if a["error"]]
        silent = [rank for rank in range(world) if rank not in answers]
        if silent and not errors:
            errors = [f"ranks {silent} did not answer within {self._deadline_s:g} s"]
        if errors:
            raise RanksError("\n".join(errors))
        return [answers[rank]["value"] for rank in range(world)]

    @staticmethod
    def _answer(pipe: Connection) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return {"value": None, "error": "died"}
        return answer

    def _start(self, world: int) -> int:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        while len(self._workers) < world:
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, self._work, self._deadline_s), daemon=True
            )
            process.start()
            there.close()
            self._workers.append((process, here))
        return int(self._store.port)


def _serve(pipe: Connection, work: str, deadline_s: float) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.getLogger("megarl.ops").setLevel(logging.ERROR)  # the first process has said it
    torch.set_num_threads(1)
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return  # the one who asks is gone
        try:
            answer = {"value": _do(request, work, deadline_s), "error": None}
        except Exception as e:
            answer = {"value": None, "error": f"{e}\n{traceback.format_exc()}"}
        try:
            pipe.send_bytes(json.dumps(answer).encode())
        except OSError:
            return


def _do(request: dict[str, Any], work: str, deadline_s: float) -> Any:
    timeout = datetime.timedelta(seconds=deadline_s)
    store = TCPStore("127.0.0.1", request["port"], is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(request["name"], store),
        rank=request["rank"],
        world_size=request["world"],
        timeout=timeout,
    )
    try:
        group = dist.group.WORLD
        assert group is not None
        module, _, function = work.partition(":")
        return getattr(importlib.import_module(module), function)(request["job"], group)
    finally:
        dist.destroy_process_group()
