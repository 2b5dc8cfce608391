"""What workers do in tests of weight pushes: an actor of some layout sends its weights."""

import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megarl.actor.actor import MegatronActor
from megarl.actor.residence import WEIGHTS
from megarl.errors import MegarlError
from megarl.hostcomm import broadcast_json
from megarl.sync.links import Links
from megarl.sync.push import PushTransport
from tests.actor.work import config_for, make_actor
from tests.sync.watched import Watched


def push(
    rank: int,
    hf: Path,
    layout: dict[str, int],
    servers: Sequence[dict[str, Any]],
    pushes: Sequence[tuple[int, Sequence[int]]],
    max_bytes: int = 2**20,
    deadline_s: float = 60.0,
    dtype: str = "fp32",
    leave: bool = True,
    offload: str = "none",
    senders: int = 1,
) -> dict[str, Any]:
    """A push for every (version, indices of ``servers``); ``deadline_s``: of every operation;
    ``offload``: idle: weights lie in host memory between the steps of a run.

    ``steps``: what became of pushes and of closing, as (None or error, Push, seconds); ``seen``:
    the operations on each server, with its version before and after.
    """
    actor = make_actor(
        config_for(hf, precision={"dtype": dtype}, memory={"offload": offload}), layout
    )
    transport = _transport(actor, max_bytes, deadline_s, senders)
    sinks = [Watched(**server, blow=None) for server in servers]
    steps = []
    try:
        for version, indices in pushes:
            chosen = [sinks[k] for k in indices]
            steps.append(_attempt(lambda v=version, c=chosen: transport.push(v, c)))
        seen = {sink.name: list(sink.seen) for sink in sinks}
        if leave:  # for the next test's trainer, which will be another one
            steps.append(_attempt(transport.close))
        return {"steps": steps, "seen": seen}
    finally:
        parallel_state.destroy_model_parallel()


def _transport(
    actor: MegatronActor, max_bytes: int, deadline_s: float, senders: int
) -> PushTransport:
    mesh, parallel = actor.parallel.mesh, actor.parallel
    told = broadcast_json(uuid.uuid4().hex[:8], 0, parallel.host)
    return PushTransport(
        source=actor.weights(senders),
        carrier=Links(told, f"rank{parallel.rank}", "gloo", deadline_s),
        rank=parallel.rank,
        stage=parallel.at.pp,
        senders=[mesh.senders(stage, senders) for stage in range(mesh.pp)],
        host=parallel.host,
        max_bytes=max_bytes,
        timeout_s=deadline_s,
        at_hand=partial(actor.resident, WEIGHTS),
    )


def _attempt(action: Any) -> tuple[tuple[str, str] | None, Any, float]:
    start = time.monotonic()
    error, receipt = None, None
    try:
        receipt = action()
    except MegarlError as e:
        error = (type(e).__name__, str(e))
    return error, receipt, time.monotonic() - start
