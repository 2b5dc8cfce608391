"""A trained model's state in Megatron's distributed checkpoint format (torch_dist), readable in any
layout.

``fully_reshardable`` optimizer state: a checkpoint of one layout loads into another. Model weights
alone (``optimizer=False``) are what the converters write and what ``model.load`` reads.
"""

import copy
import queue
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException

from megarl.actor.adam import (
    counts_by_parameter,
    create_moments,
    inner_optimizers,
    place_steps,
    set_steps,
    steps_taken,
)
from megarl.actor.fp8_delayed import delayed_state, load_delayed_state
from megarl.actor.names import unwrap
from megarl.actor.residence import OPTIMIZER, WEIGHTS
from megarl.actor.setup import Parallel
from megarl.actor.trained import TrainedModel
from megarl.errors import DataError, RunError
from megarl.hostcomm import gather_and_share
from megarl.models.dist_metadata import read_metadata, require_safe

_EXTRA_STATE = re.compile(r"\._extra_state\d*$")
_NO_PARAMETER = "no parameter"  # whose state it is, among states by parameter


def save_model(model: Sequence[torch.nn.Module], parallel: Parallel, path: Path) -> None:
    """Model weights only. Collective; ``path`` is an empty folder."""
    with parallel.active():
        _save({"model": _model_state(model, parallel)}, parallel, path)


def load_model(
    model: Sequence[torch.nn.Module], parallel: Parallel, path: Path, *, but: str | None = None
) -> None:
    """Model weights from any checkpoint of the same model; a parameter ``but`` keeps its values.
    Collective.
    """
    with parallel.active():
        wanted = _model_state(model, parallel)
        kept = {chunk: state.pop(but) for chunk, state in wanted.items() if but in state}
        found = _load({"model": wanted}, parallel, path)["model"]
    for chunk, tensor in kept.items():
        found[chunk][but] = tensor.data
    _fill(model, found)


def save_trained(trained: TrainedModel, path: Path) -> None:
    """Model, optimizer and learning-rate schedule. Collective."""
    with trained.resident(WEIGHTS, OPTIMIZER), trained.parallel.active():
        create_moments(trained.optimizer)  # of a run whose steps were all left out so far
        with _counted(trained) as steps:
            state = {**_trained_state(trained, loading=False), "steps": steps}
            state["fp8"] = delayed_state(trained.model, trained.parallel.dp_cp)
            _save(state, trained.parallel, path)


def load_trained(trained: TrainedModel, path: Path) -> None:
    """The inverse of ``save_trained``, also into another layout. Collective."""
    with trained.resident(), trained.parallel.active():
        create_moments(trained.optimizer)
        with _counted(trained):
            wanted = _trained_state(trained, loading=True)
            wanted["fp8"] = _histories_there(trained, path)
            state = _load(wanted, trained.parallel, path)
        load_delayed_state(trained.model, state.get("fp8", {}))
        _fill(trained.model, state["model"])
        steps = state.get("steps")  # older checkpoints have it in the optimizer's state alone
        trained.optimizer.load_state_dict(_regroup(state["optimizer"], trained.optimizer, steps))
        if steps is not None:
            set_steps(trained.optimizer, steps)
    trained.schedule.load_state_dict(state["schedule"])


def parameter_bytes(trained: TrainedModel) -> int:
    """Upper bound of this rank's share of a checkpoint: weights, fp32 main copy and two moments."""
    parameters = (p for chunk in trained.model for p in chunk.parameters())
    return sum(p.numel() * (p.element_size() + 12) for p in parameters)


def weight_bytes(trained: TrainedModel) -> int:
    """Of this rank's weights alone."""
    parameters = (p for chunk in trained.model for p in chunk.parameters())
    return sum(p.numel() * p.element_size() for p in parameters)


def _metadata(parallel: Parallel) -> dict[str, Any]:
    return {
        "dp_cp_group": parallel.dp_cp,
        "singleton_local_shards": False,
        "non_homogeneous_layers": True,
        # one key per tensor whether or not the experts have an optimizer of their own
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
    }


def _model_state(model: Sequence[torch.nn.Module], parallel: Parallel) -> dict[str, Any]:
    """By chunk, since chunks call their layers by the same names. A file's keys are the global
    names: it does not know of chunks.

    Without what modules keep besides tensors: Megatron's own keep nothing, and Transformer Engine's
    a pickle with the largest entries of the steps before, in FP8 with delayed scaling, and nothing
    otherwise. It fits no other layer spec, and is not to be unpickled from a file.
    """
    metadata = _metadata(parallel)
    states = [unwrap(chunk).sharded_state_dict(metadata=metadata) for chunk in model]
    return {
        f"chunk{k}": {n: t for n, t in state.items() if not _EXTRA_STATE.search(n)}
        for k, state in enumerate(states)
    }


def _fill(model: Sequence[torch.nn.Module], state: dict[str, Any]) -> None:
    for k, chunk in enumerate(model):
        found = unwrap(chunk).load_state_dict(state[f"chunk{k}"], strict=False)
        missing = [name for name in found.missing_keys if not _EXTRA_STATE.search(name)]
        assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)


def _trained_state(trained: TrainedModel, *, loading: bool) -> dict[str, Any]:
    model = _model_state(trained.model, trained.parallel)
    optimizer = trained.optimizer.sharded_state_dict(
        model, is_loading=loading, metadata=_metadata(trained.parallel)
    )
    return {"model": model, "optimizer": optimizer, "schedule": trained.schedule.state_dict()}


def _save(state: dict[str, Any], parallel: Parallel, path: Path) -> None:
    # Upstream collects the results of writers in a queue of a manager process, which outlives a
    # rank that is killed. We write in this process, so its results need not leave it.
    filesystem_async._results_queue = queue.Queue()
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), parallel.dp_cp)
    try:
        dist_checkpointing.save(state, str(path), strategy, async_strategy="mcore")
    except CheckpointException as e:  # a BaseException, with the causes of all ranks
        causes = {rank: str(failure[0]) for rank, failure in e.failures.items()}
        raise RunError(
            f"ranks could not write: {causes or 'another rank'}; see logs/rank_*.log"
        ) from e


def _load(state: dict[str, Any], parallel: Parallel, path: Path) -> dict[str, Any]:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise DataError(f"{path} is not a Megatron distributed checkpoint (no metadata.json)")
    require_safe(path)  # upstream unpickles what it finds
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), parallel.dp_cp)
    loaded: dict[str, Any] = dist_checkpointing.load(state, str(path), strategy)
    return loaded


def _histories_there(trained: TrainedModel, path: Path) -> dict[str, ShardedTensor]:
    """Of delayed scaling's state, what a checkpoint has; nothing where there is no checkpoint,
    which ``_load`` says. Raises DataError where histories are of another length.
    """
    wanted = delayed_state(trained.model, trained.parallel.dp_cp)
    if not wanted or not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        return {}
    saved = read_metadata(path).tensors
    for key in wanted.keys() & saved.keys():
        there, here = saved[key].shape[0] - 1, wanted[key].global_shape[0] - 1
        if there != here:
            raise DataError(
                f"precision.fp8.amax_history: found {here}; accepted: {there}, as the histories in "
                f"{path} have steps"
            )
    return {key: wanted[key] for key in wanted.keys() & saved.keys()}


@contextmanager
def _counted(trained: TrainedModel) -> Iterator[float]:
    """The steps that were taken, on any rank. Inside, upstream finds torch's also where all of a
    rank's parameters are frozen: it asks the state of a parameter, of which there is none, and what
    it saves is what rank 0 says. Collective.
    """
    steps = float(max(gather_and_share(steps_taken(trained.optimizer), trained.parallel.host)))
    inner = [one for one in inner_optimizers(trained.optimizer) if counts_by_parameter(one)]
    without = [one for one in inner if not one.state]
    sharded = trained.sharded_optimizer
    for one in without if sharded else ():
        one.state[_NO_PARAMETER] = {"step": torch.tensor(steps)}  # type: ignore[index]
    try:
        yield steps
    finally:
        for one in without if sharded else ():
            one.state.pop(_NO_PARAMETER, None)  # type: ignore[call-overload]


def _regroup(state: dict[Any, Any], optimizer: Any, steps: float | None) -> dict[Any, Any]:
    """Parameter groups from a layout with one optimizer into one with two (experts apart), and
    back.

    With ep > 1 Megatron keeps a second optimizer for the experts. Tensors have the same keys either
    way; the groups' settings do not, and upstream leaves moving them to the caller.
    """
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    count = len(chained)
    loose = {k: state.pop(k) for k in list(state) if not isinstance(k, int)} if count > 1 else {}
    if loose:  # saved with one, loading into several
        for i in range(count):
            entry = state.setdefault(i, {})
            for k, v in loose.items():
                entry.setdefault(k, copy.deepcopy(v))
    elif count == 1 and 0 in state:  # saved with several, loading into one
        parts = [state.pop(k) for k in sorted(k for k in state if isinstance(k, int))]
        for k, v in parts[0].items():
            state.setdefault(k, v)
    for i, part_optimizer in enumerate(chained):
        part = state[i] if count > 1 else state
        part = part.get(
            "optimizer", part
        )  # the distributed optimizer nests, the plain one does not
        saved = part["param_groups"]
        part["param_groups"] = [
            {**_same_kind(saved, group), "is_expert_parallel": group.get("is_expert_parallel")}
            for group in part_optimizer.optimizer.param_groups
        ]
        place_steps(part, part_optimizer.optimizer, steps)
    return state


def _same_kind(saved: list[dict[str, Any]], group: dict[str, Any]) -> dict[str, Any]:
    return next(g for g in saved if all(g.get(k) == group.get(k) for k in ("wd_mult", "lr_mult")))
