"""The sending end of a weight group, in a process of its own: members cannot share one."""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.sync.group import create_store, join_group, leave_group
from megarl.sync.stream import flatten


class Sender:
    """Hosts a group and, told to, broadcasts tensors of a safetensors file in it."""

    def __init__(self, file: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, file), daemon=True)
        self._process.start()

    def open(self, group: str) -> int:
        """Begins to join a new group as rank 0 of 2; returns the port of its store."""
        self._pipe.send(("open", group))
        port: int = self._pipe.recv()
        return port

    def send(self, names: Sequence[str], *, flattened: bool, group: str | None = None) -> None:
        """In the group that was joined last, if none is named."""
        self._pipe.send(("send", list(names), flattened, group))

    def shut(self) -> None:
        self._pipe.send(("shut",))

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _run(pipe: Connection, file: Path) -> None:
    torch.set_num_threads(1)
    tensors = load_file(file)
    groups: dict[str, dist.ProcessGroup] = {}
    while True:
        match pipe.recv():
            case ("open", name):
                store, port = create_store("127.0.0.1", timeout_s=20)
                pipe.send(port)
                groups[name] = join_group(
                    store, rank=0, world_size=2, group_name=name, backend="gloo", timeout_s=20
                )
            case ("send", names, flattened, name):
                group = groups[name or next(reversed(groups))]
                bucket = [(name, tensors[name]) for name in names]
                for tensor in [flatten(bucket)] if flattened else [t for _, t in bucket]:
                    dist.broadcast(tensor, group=group, group_src=0)
            case ("shut",):
                while groups:
                    leave_group(groups.popitem()[1])
