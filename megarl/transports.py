"""How a run's weights get to its servers: the settings' transport, built of its parts."""

from functools import partial

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from megarl.actor.actor import MegatronActor
from megarl.actor.residence import WEIGHTS
from megarl.actor.setup import Parallel
from megarl.config.schema import Config
from megarl.models.served import served_form
from megarl.sync.delta import Base
from megarl.sync.links import SHARED, Links
from megarl.sync.push import PushTransport
from megarl.sync.turns import Turns


def build_transport(config: Config, parallel: Parallel, actor: MegatronActor) -> PushTransport:
    """Not collective; every rank builds it."""
    sync, mesh = config.sync, parallel.mesh
    backend = _backend(config)
    return PushTransport(
        source=actor.weights(sync.senders),
        carrier=_links(config, parallel, backend),
        rank=parallel.rank,
        stage=parallel.at.pp,
        senders=[mesh.senders(stage, sync.senders) for stage in range(mesh.pp)],
        host=parallel.host,
        max_bytes=int(sync.bucket_mb * 2**20),
        timeout_s=sync.timeout_s,
        pause_mode=config.rollout.pause_mode,
        at_hand=partial(actor.resident, WEIGHTS),
        base=Base() if sync.delta else None,
        form=served_form(config, actor.spec).groups,
        device=parallel.device if backend == "nccl" else torch.device("cpu"),
    )


def _links(config: Config, parallel: Parallel, backend: str) -> Links:
    timeout_s = config.sync.timeout_s
    store = PrefixStore("megarl-weights", c10d._get_default_store())
    turns = Turns(store, timeout_s * parallel.mesh.world_size) if SHARED[backend] else None
    return Links(f"rank{parallel.rank}", backend, timeout_s, turns)


def _backend(config: Config) -> str:
    """NCCL needs a device per member; a server that we start shares its device with rank 0."""
    if config.sync.backend != "auto":
        return config.sync.backend
    elsewhere = config.rollout.urls or config.rollout.discover
    return "nccl" if torch.cuda.is_available() and elsewhere else "gloo"
