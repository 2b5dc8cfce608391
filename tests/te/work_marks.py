"""Marks of parameters by which Megatron reduces and counts their gradients."""

from pathlib import Path
from typing import Any

from megarl.actor.actor import MegatronActor
from megarl.actor.names import global_parameters
from tests.te.actions import Layout, with_actor

# What a parameter without the mark is taken for: finalize_model_grads.py,
# distributed_data_parallel.py and tensor_parallel/layers.py of upstream
DEFAULTS = {"sequence_parallel": False, "allreduce": True, "tensor_model_parallel": False}


def marks(rank: int, hf: Path, layout: Layout, **sections: Any) -> dict[str, dict[str, bool]]:
    """By global name."""

    def look(actor: MegatronActor) -> dict[str, dict[str, bool]]:
        return {
            name: {mark: bool(getattr(p, mark, default)) for mark, default in DEFAULTS.items()}
            for name, p in global_parameters(actor.model, actor.parallel)
        }

    return with_actor(look, hf, layout, **sections)
