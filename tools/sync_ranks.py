"""The processes of bench_sync.py: trainer ranks that push, and the receivers of the raw broadcast.

Each waits on a pipe for the name of a measurement and answers with what it found.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mesh import Mesh
from megarl.sync.group import join_group

REGION = 2**28  # bytes that the floor's copies go through in turn: far more than caches hold
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Task:
    """What a trainer rank has to know. ``port``: of the ranks' store; ``settings``: of a run;
    ``groups``: the port of its raw broadcast's store, by sender.
    """

    rank: int
    port: int
    mesh: Mesh
    settings: dict[str, Any]
    servers: list[dict[str, Any]]
    groups: dict[int, int]
    region: int = REGION


def answering(pipe: Connection, commands: dict[str, Callable[..., Any]]) -> None:
    """Until the other end is gone."""
    pipe.send("ready")
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # taking torch apart would take a second
        pipe.send(commands[name](*arguments))


# ---- the raw broadcast -------------------------------------------------------------------------


class Floor:
    """One end of a broadcast with nothing around it. ``copies``: every bucket is also copied once
    at this end, from other memory or to it.
    """

    def __init__(self, port: int, rank: int, world: int, bucket: int, region: int) -> None:
        self._group = join_group(
            f"127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            group_name=f"floor-{port}",
            backend="gloo",
            timeout_s=TIMEOUT_S,
        )
        self._sends = rank == 0
        self._bucket = torch.ones(bucket, dtype=torch.uint8)
        self._region = torch.ones(max(region, bucket), dtype=torch.uint8)

    def __call__(self, sizes: Sequence[int], copies: bool) -> tuple[float, float]:
        """Seconds until all ends are through, and of these what copies took here."""
        self._make_room(max(sizes))
        start, at, copying = time.perf_counter(), 0, 0.0
        for size in sizes:
            if at + size > len(self._region):
                at = 0
            here, there = self._bucket[:size], self._region[at : at + size]
            if copies and self._sends:
                before = time.perf_counter()
                here.copy_(there)
                copying += time.perf_counter() - before
            dist.broadcast(here, group=self._group, group_src=0)
            if copies and not self._sends:
                there.copy_(here)
            at += size
        self._group.barrier().wait()
        return time.perf_counter() - start, copying

    def _make_room(self, num_bytes: int) -> None:
        """For a tensor that is larger than a bucket, which the first floor does not count."""
        if num_bytes > len(self._bucket):
            self._bucket = torch.ones(num_bytes, dtype=torch.uint8)
        if num_bytes > len(self._region):
            self._region = torch.ones(num_bytes, dtype=torch.uint8)


def receiver(
    pipe: Connection, ports: Sequence[int], rank: int, world: int, bucket: int, region: int
) -> None:
    """Of all senders' broadcasts, at the same time."""
    torch.set_num_threads(1)
    with ThreadPoolExecutor(len(ports)) as pool:
        joins = [pool.submit(Floor, port, rank, world, bucket, region) for port in ports]
        floors = [join.result() for join in joins]

        def receive(sizes: Sequence[Sequence[int]], copies: bool) -> dict[str, Any]:
            cpu = time.process_time()
            futures = [
                pool.submit(floor, of, copies) for floor, of in zip(floors, sizes, strict=True)
            ]
            seconds = max(future.result()[0] for future in futures)
            return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu}

        answering(pipe, {"floor": receive})


# ---- pushes --------------------------------------------------------------------------------------


def trainer(pipe: Connection, task: Task) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", task.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.mesh.world_size)
    pushing = Pushing(task)
    answering(pipe, {"push": pushing.push, "floor": pushing.floor})


@dataclass
class Untrained:
    """As much of an actor as a push needs; without optimizer state, which would be most of it."""

    source: Any
    spec: Any

    def weights(self, senders: int) -> Any:
        return self.source(senders)

    def resident(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()


class Pushing:
    """One rank's transport, as a run builds it, with a watch on what it gathers and sends."""

    def __init__(self, task: Task) -> None:
        from megarl.actor.export import MegatronWeights
        from megarl.actor.load import load_hf_weights
        from megarl.actor.model import build_model, dtype_of
        from megarl.actor.setup import init_parallel
        from megarl.config.schema import Config
        from megarl.models.hf_complete import open_model
        from megarl.models.spec import read_spec
        from megarl.rollout.control import ServerControl
        from megarl.rundir import RunDir
        from megarl.transports import build_transport

        config = Config.model_validate(task.settings)
        spec = read_spec(config.model.hf)
        self.parallel = parallel = init_parallel(task.mesh, seed=0, timeout_s=TIMEOUT_S)
        model = build_model(spec, parallel, dtype_of(config.precision))
        load_hf_weights(model, open_model(config.model.hf, spec), spec, parallel)
        actor: Any = Untrained(lambda count: MegatronWeights(model, spec, parallel, count), spec)
        self.transport = build_transport(config, RunDir(config.run.dir), parallel, actor)
        self.source = self.transport.source = Watched(self.transport.source)
        self.carrier = self.transport.carrier = Carried(self.transport.carrier)
        self.servers = [dict(server) for server in task.servers]
        self.pids = [server.pop("pid") for server in self.servers]
        self.sinks = [ServerControl(**server) for server in self.servers]
        self.raw: Floor | None = None
        if task.rank in task.groups:
            bucket = self.transport.max_bytes
            world = 1 + len(self.sinks)
            self.raw = Floor(task.groups[task.rank], 0, world, bucket, task.region)
        self.resident = memory(os.getpid(), "VmRSS")
        self.at_servers = [memory(pid, "VmRSS") for pid in self.pids]

    def push(self, version: int) -> dict[str, Any]:
        """Seconds of this rank; ``peak_bytes``: the most memory so far beyond that before the first
        push, here and (on rank 0) at the servers.
        """
        self.source.seconds, self.carrier.seconds, self.carrier.sizes = 0.0, 0.0, []
        for pid in [os.getpid(), *self.pids]:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins here
        dist.barrier(self.parallel.host)
        start, cpu = time.perf_counter(), time.process_time()
        cpus = [cpu_seconds(pid) for pid in self.pids]
        digests = self.transport._packer.digest_seconds
        done = self.transport.push(version, self.sinks)
        assert not done.lost, done.lost
        found: dict[str, Any] = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu,
            "digest_seconds": self.transport._packer.digest_seconds - digests,
            "gather_seconds": self.source.seconds,
            "send_seconds": self.carrier.seconds,
            "sizes": self.carrier.sizes,
            "peak_bytes": memory(os.getpid(), "VmHWM") - self.resident,
        }
        if done.receipt is None:
            return found
        now = [memory(pid, "VmHWM") for pid in self.pids]
        return found | {
            "receipt": vars(done.receipt),
            "server_peak_bytes": [b - a for a, b in zip(self.at_servers, now, strict=True)],
            "server_cpu_seconds": [
                cpu_seconds(pid) - before for pid, before in zip(self.pids, cpus, strict=True)
            ],
        }

    def floor(self, sizes: Sequence[int], copies: bool) -> dict[str, Any]:
        dist.barrier(self.parallel.host)
        cpu = time.process_time()
        seconds, copying = (0.0, 0.0) if self.raw is None else self.raw(sizes, copies)
        used = time.process_time() - cpu
        return {"seconds": seconds, "copy_seconds": copying, "cpu_seconds": used}


@dataclass
class Watched:
    """A source, and the time that its tensors took to come."""

    source: Any
    seconds: float = 0.0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        tensors = self.source.tensors()
        while True:
            start = time.perf_counter()
            found = next(tensors, None)
            self.seconds += time.perf_counter() - start
            if found is None:
                return
            yield found


@dataclass
class Carried:
    """A carrier, what it was given and the time that it took."""

    carrier: Any
    seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)

    def send(self, bucket: Any, names: Iterable[str]) -> Any:
        start = time.perf_counter()
        found = self.carrier.send(bucket, names)
        self.seconds += time.perf_counter() - start
        self.sizes.append(bucket.flat.numel())
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.carrier, name)


def memory(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def cpu_seconds(pid: int) -> float:
    """Of the process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
