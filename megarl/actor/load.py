"""Hugging Face weights -> this rank's shard of the Megatron model."""

from collections.abc import Collection, Sequence

import torch

from megarl.actor.model import padded_vocab
from megarl.actor.names import global_weights
from megarl.actor.setup import Parallel
from megarl.models.hf_complete import check_complete
from megarl.models.hf_io import HfCheckpoint
from megarl.models.hf_parameters import read_parameter
from megarl.models.mapping import ModelMapping, mapping_for
from megarl.models.spec import ModelSpec


def load_hf_weights(
    model: Sequence[torch.nn.Module],
    checkpoint: HfCheckpoint,
    spec: ModelSpec,
    parallel: Parallel,
    *,
    but: str | None = None,
    extra: Collection[str] = (),
) -> None:
    """Fill every weight of every chunk from ``checkpoint``, ``but`` one, if any; each rank reads
    only what it holds. ``extra``: tensors that may be there and may be missing.

    Raises DataError when a tensor is missing, unknown, or of another shape than config.json
    implies.
    """
    mapping = mapping_for(spec, padded_vocab(spec))
    check_complete(checkpoint, spec, extra)
    with torch.no_grad():
        for name, weight in global_weights(model, parallel):
            if name == but:
                continue
            rank, size = tp_place(name, mapping, parallel)
            shard = torch.empty(weight.shape, dtype=weight.dtype)
            read_parameter(checkpoint, mapping, name, shard, rank, size)
            weight.copy_(shard)
            if hasattr(weight, "get_high_precision_init_val"):
                # Kept in FP8; its main parameter is to start from the values before rounding.
                weight.get_high_precision_init_val().copy_(shard)


def tp_place(name: str, mapping: ModelMapping, parallel: Parallel) -> tuple[int, int]:
    """(rank, size) of the axis that splits this parameter's matrices: etp for experts, tp for the
    rest.
    """
    if mapping.is_expert(name):
        return parallel.at.etp, parallel.mesh.etp
    return parallel.at.tp, parallel.mesh.tp
