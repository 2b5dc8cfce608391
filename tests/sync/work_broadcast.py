"""What workers do in tests of weight pushes: an actor of some layout sends its weights."""

import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megarl.actor.actor import MegatronActor
from megarl.errors import MegarlError
from megarl.rollout.control import ServerControl
from megarl.sync.broadcast import BroadcastTransport
from tests.actor.work import config_for, make_actor


class Watched(ServerControl):
    """A server that is asked for its version around every operation, and, for tests of failure,
    killed before the ``nth`` operation of one kind."""

    def __init__(self, url: str, key: str, kill: tuple[str, int, int] | None) -> None:
        super().__init__(url, key)
        self.key, self.kill = key, kill
        self.seen: list[tuple[str, str, str]] = []

    def control(self, op: str, payload: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        if self.kill is not None and op == self.kill[0]:
            nth = sum(seen == op for seen, *_ in self.seen)
            if nth == self.kill[1]:
                os.kill(self.kill[2], signal.SIGKILL)
        before = self.version()
        reply = super().control(op, payload, timeout_s)
        self.seen.append((op, before, self.version()))
        return reply

    def version(self) -> str:
        """ "gone" for a server that does not answer."""
        bearer = {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}/server_info", headers=bearer)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=10) as response:
                return str(json.load(response)["weight_version"])
        except OSError:
            return "gone"


def push(
    rank: int,
    hf: Path,
    layout: dict[str, int],
    url: str,
    key: str,
    versions: list[int],
    max_bytes: int = 2**20,
    deadline_s: float = 60.0,
    kill: tuple[str, int, int] | None = None,
    dtype: str = "fp32",
    leave: bool = True,
) -> dict[str, Any]:
    """Connect and push once a version; ``deadline_s``: of every operation.

    ``steps``: what became of connecting, pushes and closing, as (None or error, receipt, seconds);
    ``seen``: the operations on the server, with its version before and after.
    """
    actor = make_actor(config_for(hf, precision={"dtype": dtype}), layout)
    transport = _transport(actor, max_bytes, deadline_s)
    sinks = [Watched(url, key, kill)] if transport.sending else []
    steps = [_attempt(lambda: transport.connect(actor.weights(), sinks))]
    try:
        if steps[0][0] is None:
            steps += [_attempt(lambda v=v: transport.push(v)) for v in versions]
        seen = [s for sink in sinks for s in sink.seen]
        steps.append(_attempt(transport.close))
        return {"steps": steps, "seen": seen}
    finally:
        if leave:  # for the next test's trainer, which will be another one
            for sink in sinks:
                with contextlib.suppress(MegarlError):
                    sink.control("leave_group", {"group_name": transport.group_name}, 5.0)
        parallel_state.destroy_model_parallel()


def _transport(actor: MegatronActor, max_bytes: int, deadline_s: float) -> BroadcastTransport:
    mesh, parallel = actor.parallel.mesh, actor.parallel
    return BroadcastTransport(
        rank=parallel.rank,
        stage=parallel.at.pp,
        senders=[mesh.sender(stage) for stage in range(mesh.pp)],
        host=parallel.host,
        address="127.0.0.1",
        backend="gloo",
        max_bytes=max_bytes,
        timeout_s=deadline_s,
    )


def _attempt(action: Any) -> tuple[tuple[str, str] | None, Any, float]:
    start = time.monotonic()
    error, receipt = None, None
    try:
        receipt = action()
    except MegarlError as e:
        error = (type(e).__name__, str(e))
    return error, receipt, time.monotonic() - start
