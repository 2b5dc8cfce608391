"""What workers do in the matrix of pushes: an actor of some layout sends its weights by every
transport in turn, as a run with these settings builds it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megarl.rundir import RunDir
from megarl.transports import build_transport
from tests.actor.work import config_for, make_actor
from tests.sync.asked import ask, checksum_of, sampled
from tests.sync.watched import Watched


def push_each_way(
    rank: int,
    hf: Path,
    served: Path | None,
    dtype: str,
    layout: dict[str, int],
    ways: Sequence[str],
    engine: str,
    server: dict[str, Any],
    before: Path,
    folder: Path,
) -> list[dict[str, Any]]:
    """Versions 1, 2, ... of ``hf``, each to the server as it is with the weights of ``before``.
    ``served``: a folder in the servers' form, if it is not the trainer's.

    Of rank 0, for every way: ``lost``, ``receipt``, ``moves`` of the version (operation, from, to),
    ``digests`` that the server confirms, SGLang's own ``checksum``, and what it samples before and
    after, see ``sampled``.
    """
    found = []
    precision = {"dtype": dtype}
    actor = make_actor(config_for(hf, precision=precision), layout)
    try:
        for version, way in enumerate(ways, start=1):
            config = config_for(
                hf,
                precision=precision,
                rollout={"engine": engine, "model": served},
                sync={"transport": way, "backend": "gloo", "bucket_mb": 0.3, "senders": 1},
            )
            sink = Watched(**server, blow=None)
            sink.patience_s = 30.0
            if not rank:
                load = {"model_path": str(before), "weight_version": "0"}
                ask(server, "/update_weights_from_disk", **load)
                old = [sampled(server) for _ in range(2)][1]
            transport = build_transport(config, RunDir(folder / way), actor.parallel, actor)
            push = transport.push(version, [sink])
            transport.close()
            if rank:
                continue
            found.append(
                {
                    "lost": push.lost,
                    "receipt": push.receipt,
                    "moves": [(op, a, b) for op, a, b in sink.seen if a != b],
                    "operations": [op for op, *_ in sink.seen],
                    "digests": sink.control("digest", {}, 60)["digests"],
                    "checksum": checksum_of(server) if engine == "sglang" else None,
                    "old": old,
                    "new": sampled(server),
                }
            )
        return found
    finally:
        parallel_state.destroy_model_parallel()
