"""What workers do in ``test_families.py``: log-probs, and gradients of a weighted sum of them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.actor.actor import MegatronActor
from megarl.actor.names import global_parameters, unwrap
from megarl.actor.state import _model_state
from megarl.actor.step import RowResult, local, loss_scale
from megarl.types import PackedBatch, Sample
from tests.actor.work import by_sample, config_for, gradients, make_actor, plan_for
from tests.actor.work_state import ONE_STEP, Trainee
from tests.helpers.families import token_weights


def evaluate(
    rank: int,
    models: dict[str, Path],
    layouts: dict[str, dict[str, int]],
    samples: Sequence[Sample],
    row_tokens: int,
    with_gradients: bool = True,
) -> dict[str, dict[str, Any]]:
    """Of every model: log-probs of every sample on the ranks that hold them, and the gradients this
    rank is the sender of.
    """
    return {
        name: _evaluate(folder, layouts[name], list(samples), row_tokens, with_gradients)
        for name, folder in models.items()
    }


def _evaluate(
    folder: Path,
    layout: dict[str, int],
    samples: list[Sample],
    row_tokens: int,
    with_gradients: bool,
) -> dict[str, Any]:
    from megatron.core import parallel_state

    config = config_for(folder, algo={"minibatches": 1}, train={"row_tokens": row_tokens})
    actor = make_actor(config, layout)
    try:
        plan = plan_for(actor, config, samples)
        actor.logprobs(plan)
        rows = plan.steps[0]
        found = {i: values for row in rows for i, values in by_sample(row, actor.parallel)}
        if not with_gradients:
            return {"logprobs": found, "gradients": {}}
        actor.gradients(rows, actor._of_logprobs(_weighted_sum(actor, len(rows))))
        return {"logprobs": found, "gradients": gradients(actor)}
    finally:
        parallel_state.destroy_model_parallel()


def after_a_step(rank: int, hf: Path, layout: dict[str, int]) -> dict[str, Any]:
    """``reference``: the weights after those of the reference policy, which were spoilt, have been
    in their place; ``after``: those after one optimizer step.
    """
    from megatron.core import parallel_state

    trainee = Trainee(hf, layout, {"algo": ONE_STEP})
    actor = trainee.actor
    try:
        _watch_layers_behind(actor)
        own = trainee.weights()
        actor.keep_reference()
        assert actor.reference is not None
        for kept in filter(torch.is_floating_point, actor.reference._copy):
            kept.add_(0.25)
        with actor.reference.loaded([chunk.module for chunk in actor.model]):
            moved = trainee.weights()
        assert any(not torch.equal(moved[n], t) for n, t in own.items())
        found = {"reference": trainee.weights()}
        actor.reference = None
        trainee.steps(0, 1)
        return {**found, "after": trainee.weights()}
    finally:
        parallel_state.destroy_model_parallel()


def checkpoint_keys(rank: int, hf: Path, layout: dict[str, int]) -> set[str]:
    """Of weights, as a file has them; ``N`` for the number of a layer."""
    from megatron.core import parallel_state

    actor = make_actor(config_for(hf), layout)
    try:
        tensors = _model_state(actor.model, actor.parallel)["chunk0"]
        keys = {re.sub(r"layers\.\d+", "layers.N", t.key) for t in tensors.values()}
        return {key for key in keys if not key.endswith("_extra_state")}
    finally:
        parallel_state.destroy_model_parallel()


def _watch_layers_behind(actor: MegatronActor) -> None:
    """Nothing is to compute with multi-token prediction's layers, or to keep gradients of them."""

    def called(module: torch.nn.Module, inputs: Any) -> None:
        raise AssertionError(f"{type(module).__name__} of a multi-token prediction layer ran")

    for name, parameter in global_parameters(actor.model, actor.parallel):
        assert hasattr(parameter, "main_grad") != name.startswith("mtp."), name
    for chunk in map(unwrap, actor.model):
        for module in chunk.mtp.modules() if hasattr(chunk, "mtp") else ():
            module.register_forward_pre_hook(called)


def _weighted_sum(actor: MegatronActor, num_microbatches: int) -> Any:
    """Of log-probs times ``token_weights``, on every trained token."""
    scale = loss_scale(actor.parallel, num_microbatches)

    def finish(
        row: PackedBatch, index: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, RowResult]:
        tokens = {i: row.tokens[start : start + n].tolist() for i, start, n in row.segments()}
        weight = row.spread(lambda i: token_weights(tokens[i])).float()
        loss = (logprobs * local(weight, index=index, device=actor.parallel.device)).sum()
        return loss * scale, RowResult([])

    return finish
