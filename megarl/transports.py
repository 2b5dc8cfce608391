"""How a run's weights get to its servers: the settings' transport, built of its parts."""

import uuid
from collections.abc import Callable
from functools import partial

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from megarl.actor.actor import MegatronActor
from megarl.actor.residence import WEIGHTS
from megarl.actor.setup import Parallel
from megarl.config.schema import Config
from megarl.errors import ConfigError, Problem
from megarl.hostcomm import agree, broadcast_json, gather_and_share
from megarl.models.served import served_form
from megarl.rundir import RunDir
from megarl.sync.carrier import Carrier
from megarl.sync.colocated import Colocated, Handover
from megarl.sync.delta import Base
from megarl.sync.disk import Disk
from megarl.sync.links import SHARED, Links
from megarl.sync.push import PushTransport
from megarl.sync.shared_memory import SharedMemory, machine
from megarl.sync.tensor_handles import TensorHandles
from megarl.sync.turns import Turns
from megarl.sync.version_folders import Publisher

_CPU = torch.device("cpu")


def build_transport(
    config: Config, rundir: RunDir, parallel: Parallel, actor: MegatronActor
) -> PushTransport:
    """Collective."""
    sync, mesh = config.sync, parallel.mesh
    carrier, device = _CARRIERS[sync.transport](config, rundir, parallel)
    return PushTransport(
        source=actor.weights(sync.senders),
        carrier=carrier,
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
        device=device,
    )


Built = tuple[Carrier, torch.device]  # and where buckets are sent from


def _links(config: Config, rundir: RunDir, parallel: Parallel) -> Built:
    timeout_s, backend = config.sync.timeout_s, _backend(config)
    store = PrefixStore("megarl-weights", c10d._get_default_store())
    senders = config.sync.senders * parallel.mesh.pp
    turns = Turns(store, timeout_s * senders) if SHARED[backend] else None
    trainer = broadcast_json(uuid.uuid4().hex[:8], 0, parallel.host)
    links = Links(trainer, f"rank{parallel.rank}", backend, timeout_s, turns)
    return links, parallel.device if backend == "nccl" else _CPU


def _backend(config: Config) -> str:
    """NCCL needs a device per member. Servers that megarl starts, by itself or beside the trainer
    (``rollout.discover``), share theirs with ranks.
    """
    if config.sync.backend != "auto":
        return config.sync.backend
    return "nccl" if torch.cuda.is_available() and config.rollout.urls else "gloo"


def _colocated(config: Config, rundir: RunDir, parallel: Parallel) -> Built:
    """Where servers are is theirs to find out (shared_memory.py, tensor_handles.py)."""
    machines = len(set(gather_and_share(machine(), parallel.host)))
    if machines > 1:
        found = f"colocated with trainer ranks on {machines} machines"
        accepted = "broadcast or disk; colocated where all ranks and servers are on one machine"
        raise ConfigError([Problem("sync.transport", found, accepted)])
    device = parallel.device if config.rollout.engine == "sglang" else _CPU
    handover: Handover = (
        TensorHandles(device) if config.rollout.engine == "sglang" else SharedMemory()
    )
    return Colocated(handover, config.sync.timeout_s), device


def _disk(config: Config, rundir: RunDir, parallel: Parallel) -> Built:
    folder = (config.sync.folder or rundir.weights).absolute()
    run = broadcast_json(uuid.uuid4().hex[:8], 0, parallel.host)
    publisher, error = None, None
    if parallel.rank == 0:
        try:
            publisher = Publisher(folder, config.server_hf)
        except Exception as e:
            error = e
    agree(error, parallel.host, "opening sync.folder")
    about = {"run": run, "label": f"rank{parallel.rank}", "timeout_s": config.sync.timeout_s}
    return Disk(folder, **about, publisher=publisher), _CPU


_CARRIERS: dict[str, Callable[[Config, RunDir, Parallel], Built]] = {
    "broadcast": _links,
    "colocated": _colocated,
    "disk": _disk,
}
