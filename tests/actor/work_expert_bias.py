"""What workers do in ``test_expert_bias.py``: optimizer steps, and the biases after them."""

from pathlib import Path
from typing import Any

import torch

from megarl.types import Sample
from tests.actor.work import config_for, make_actor, prepare

RATE = 0.25


def biases(
    rank: int,
    hf: Path,
    layout: dict[str, int],
    steps: list[list[Sample]],
    *,
    frozen: bool = False,
    skip: bool = False,
    skip_first: bool = False,
    **sections: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """By HF name, on the stage's sender, after an optimizer step on each of ``steps``, before which
    log-probs are computed. ``skip``: the steps are not taken; ``skip_first``: the first
    is not.
    """
    from megatron.core import parallel_state

    given = {
        "algo": {"minibatches": 1},
        "moe": {"router_bias_update_rate": RATE},
        "train": {"frozen": ["*.mlp.gate.weight"] if frozen else []},
    }
    for section, values in sections.items():
        given[section] = {**given.get(section, {}), **values}
    config = config_for(hf, **given)
    actor = make_actor(config, layout)
    try:
        for number, samples in enumerate(steps):
            plan = prepare(actor, config, samples)
            actor.logprobs(plan)
            actor.forward_backward(plan.steps[0])
            actor.update(skip=skip or (skip_first and number == 0))
        return {
            name: tensor.clone()
            for name, tensor in actor.weights().tensors()
            if name.endswith("e_score_correction_bias")
        }
    finally:
        parallel_state.destroy_model_parallel()
