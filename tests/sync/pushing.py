"""Pushes of files' weights to several real servers, and what becomes of them."""

from pathlib import Path
from typing import Any

from megarl.types import Push
from tests.helpers.dist import WorkerPool
from tests.sync.servers import Server, digests_of

BOUND_S = 15.0  # of a push in which servers die; deadlines are 30 s unless a test sets them


class Trainer:
    def __init__(self, pool: WorkerPool, models: list[Path], servers: list[Server]) -> None:
        self.pool, self.models, self.servers = pool, models, servers

    def push(
        self, *whom: list[int], world: int = 2, stages: int = 1, **options: Any
    ) -> tuple[list[Push], list[float], dict[str, list[tuple[str, str, str]]]]:
        """One push to each set of servers, of versions 1, 2, ... and alternating weights. What
        became of each, the same on every rank, its seconds, and what was asked of every server.
        """
        pushes = [(v, self.file(v), k) for v, k in enumerate(whom, start=1)]
        described = [server.described for server in self.servers]
        work = "tests.sync.work_push:push"
        options = {"stages": stages, "servers": described, "pushes": pushes, **options}
        ranks = self.pool.run(work, world=world, **options)
        assert [step[0] for rank in ranks for step in rank["steps"]] == [None] * world * len(whom)
        first = [step[1] for step in ranks[0]["steps"]]
        for rank in ranks[1:]:
            assert [step[1].lost for step in rank["steps"]] == [push.lost for push in first]
        seconds = [max(rank["steps"][k][2] for rank in ranks) for k in range(len(whom))]
        seen: dict[str, list[tuple[str, str, str]]] = {}
        for rank in ranks:
            for boot, operations in rank["seen"].items():
                seen.setdefault(boot, []).extend(operations)
        return first, seconds, seen

    def file(self, version: int) -> Path:
        return self.models[version % 2] / "model.safetensors"

    def serves(self, server: Server, version: int) -> None:
        """Exactly these weights, under this version, and it samples."""
        assert server.digests() == digests_of(self.models[version % 2])
        status, reply = server.generate()
        assert (status, reply["meta_info"]["weight_version"]) == (200, str(version))
