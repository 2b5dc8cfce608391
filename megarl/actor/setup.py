"""Process groups of the trainer, torch.distributed's and Megatron's, from a ``Mesh``."""

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megarl.actor.arguments import virtual_stages
from megarl.mesh import Coordinates, Mesh


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
    model_parallel_cuda_manual_seed(seed)
    rank = dist.get_rank()
    return Parallel(
        mesh=mesh,
        rank=rank,
        local_rank=local_rank,
        at=mesh.coordinates(rank),
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        tp=parallel_state.get_tensor_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        stage=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        experts=parallel_state.get_expert_tensor_and_model_parallel_group(),
        host=dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD,
    )


def destroy_parallel() -> None:
    """Undo ``init_parallel``; safe to call twice."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
