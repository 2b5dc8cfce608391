"""What workers do in ``test_aux_loss.py``: gradients of a batch in which nothing is trained."""

from pathlib import Path
from typing import Any

from megarl.types import Sample
from tests.actor.work import config_for, gradients, make_actor, prepare


def gradients_of(
    rank: int,
    hf: Path,
    layout: dict[str, int],
    samples: list[Sample],
    row_tokens: int,
    moe: dict[str, Any],
) -> dict[str, Any]:
    from megatron.core import parallel_state

    train = {"row_tokens": row_tokens}
    config = config_for(hf, algo={"minibatches": 1}, train=train, moe=moe)
    actor = make_actor(config, layout)
    try:
        plan = prepare(actor, config, samples)
        actor.forward_backward(plan.steps[0])
        return gradients(actor)
    finally:
        parallel_state.destroy_model_parallel()
