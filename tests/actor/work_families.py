"""What workers do in ``test_families.py``: log-probs, and gradients of a weighted sum of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.actor.actor import MegatronActor
from megarl.actor.step import RowResult, local, loss_scale
from megarl.types import PackedBatch, Sample
from tests.actor.work import config_for, gradients, make_actor, plan_for
from tests.actor.work_split import noise_of
from tests.actor.work_state import ONE_STEP, Trainee


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
        found = {i: values for row in rows for i, values in _by_sample(actor, row)}
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
        trainee_weights = trainee.weights()
        chunks = [chunk.module for chunk in actor.model]
        actor.keep_reference()
        assert actor.reference is not None
        with torch.no_grad():
            for kept in actor.reference._copy:
                kept.add_(0.25)
        with actor.reference.loaded(chunks):
            moved = trainee.weights()
        assert any(not torch.equal(moved[n], t) for n, t in trainee_weights.items())
        found = {"reference": trainee.weights()}
        actor.reference = None
        trainee.steps(0, 1)
        return {**found, "after": trainee.weights()}
    finally:
        parallel_state.destroy_model_parallel()


def _by_sample(actor: MegatronActor, row: PackedBatch) -> Any:
    """(sample, log-probs of its tokens 1..L-1), once among the ranks that hold them."""
    if row.old_logprobs is None or not actor.parallel.speaks_for_rows:
        return
    for i, start, length in row.segments():
        yield i, row.old_logprobs[start : start + length - 1].clone()


def _weighted_sum(actor: MegatronActor, num_microbatches: int) -> Any:
    """Weights are of order 1 and both signs, on every trained token."""
    scale = loss_scale(actor.parallel, num_microbatches)

    def finish(
        row: PackedBatch, index: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, RowResult]:
        weight = row.spread(noise_of(row, 1.0)).float()
        loss = (logprobs * local(weight, index=index, device=actor.parallel.device)).sum()
        return loss * scale, RowResult([], [])

    return finish
