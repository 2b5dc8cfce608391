"""Process groups of the trainer, torch.distributed's and Megatron's, from a ``Mesh``.

Two layouts on the same ranks (a critic's beside the actor's): Megatron keeps its groups, degrees
and ranks in the variables of ``parallel_state``. Handing each model a ``ProcessGroupCollection``
would cover its layers and its optimizer, but schedules, checkpointing, gradient finalisation and
the experts' helpers ask ``parallel_state`` all the same, and would get the other layout's answer
without an error. So every layout after the first brings a copy of all those variables, and
``Parallel.active`` puts it in their place for the time its model is built, called or saved. The
first layout is what is there otherwise; it pays nothing.
"""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megarl.actor.arguments import virtual_stages
from megarl.mesh import Coordinates, Mesh

Variables = dict[str, Any]  # of a module, by name


def layout_variables() -> Variables:
    """All that ``parallel_state`` knows of a layout, as it is now."""
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_")
        and not name.startswith("__")
        and not isinstance(value, FunctionType | ModuleType | type)
    }


_NO_LAYOUT = layout_variables()


@dataclass(frozen=True)
class Parallel:
    """This rank's place and groups. ``host``: gloo, all trainer ranks, for host messages."""

    mesh: Mesh
    rank: int
    local_rank: int  # 0 on one rank of every node
    at: Coordinates
    device: torch.device
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    pp: dist.ProcessGroup
    stage: dist.ProcessGroup  # tp * cp * dp: all ranks that hold the same layers
    experts: (
        dist.ProcessGroup
    )  # all etp * ep shards of one replica of a stage's experts, etp fastest
    host: Any
    # Upstream's module variables that are this layout's and not the first one's
    own: dict[ModuleType, Variables] = field(default_factory=dict, repr=False, compare=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, upstream's module variables are those of this layout. Not to be nested."""
        outside = {module: _values(module, own) for module, own in self.own.items()}
        _put(self.own)
        try:
            yield
        finally:
            for module, own in self.own.items():  # what was created on first use stays with it
                own.update(_values(module, own))
            _put(outside)

    @property
    def last_stage(self) -> bool:
        return self.at.pp == self.mesh.pp - 1

    @property
    def speaks_for_tokens(self) -> bool:
        """One of the ranks with the same per-token results: sums count a token once."""
        return self.last_stage and self.at.tp == 0

    @property
    def speaks_for_rows(self) -> bool:
        """One of the ranks with the same whole rows."""
        return self.speaks_for_tokens and self.at.cp == 0


def init_parallel(mesh: Mesh, *, local_rank: int = 0, seed: int, timeout_s: float) -> Parallel:
    """Build every group of the layout. Collective over the mesh.

    A default process group must exist unless the mesh is one rank; ``local_rank`` chooses the CUDA
    device.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(
            backend,
            store=torch._C._distributed_c10d.HashStore(),
            rank=0,
            world_size=1,
            timeout=timeout,
        )
    _initialize(mesh, timeout_s)
    model_parallel_cuda_manual_seed(seed)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    host = dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD
    return _current(mesh, local_rank, device, host)


def init_beside(first: Parallel, mesh: Mesh, *, timeout_s: float) -> Parallel:
    """The place of a second model on the same ranks: the groups of the first where it has the same
    layout, else its own. Collective over all ranks.

    Upstream's random number streams stay those of the first: nothing here draws from them.
    """
    if mesh == first.mesh:
        return first
    layout_of_first = layout_variables()
    _put({parallel_state: _NO_LAYOUT})
    try:
        _initialize(mesh, timeout_s)
        own = {parallel_state: layout_variables()}
        return replace(_current(mesh, first.local_rank, first.device, first.host), own=own)
    finally:
        _put({parallel_state: layout_of_first})


def _initialize(mesh: Mesh, timeout_s: float) -> None:
    assert dist.get_world_size() == mesh.world_size, (dist.get_world_size(), mesh)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        virtual_pipeline_model_parallel_size=virtual_stages(mesh),
        context_parallel_size=mesh.cp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )


def _current(mesh: Mesh, local_rank: int, device: torch.device, host: Any) -> Parallel:
    """The layout that ``parallel_state`` has now."""
    rank = dist.get_rank()
    return Parallel(
        mesh=mesh,
        rank=rank,
        local_rank=local_rank,
        at=mesh.coordinates(rank),
        device=device,
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        stage=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        experts=parallel_state.get_expert_tensor_and_model_parallel_group(),
        host=host,
    )


def _values(module: ModuleType, names: Variables) -> Variables:
    return {name: getattr(module, name) for name in names}


def _put(variables: dict[ModuleType, Variables]) -> None:
    for module, values in variables.items():
        for name, value in values.items():
            setattr(module, name, value)


def destroy_parallel() -> None:
    """Undo ``init_parallel``; safe to call twice."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
