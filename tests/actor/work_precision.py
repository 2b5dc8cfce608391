"""Worker side of test_precision.py: one training pass in bf16, with our log-probs or eager ones."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.actor.step import OnOutput, local, policy_loss
from megarl.types import Coefficients, PackedBatch, Sample
from tests.actor.work import config_for, gradients, make_actor, prepare


def step(
    rank: int, hf: Path, layout: dict[str, int], samples: list[Sample], eager: bool
) -> dict[str, Any]:
    """Gradients, and the dtypes of what losses were given."""
    from megatron.core import parallel_state

    config = config_for(hf, precision={"dtype": "bf16"}, algo={"minibatches": 1})
    actor = make_actor(config, layout)
    try:
        rows = prepare(actor, config, samples).steps[0]
        loss = policy_loss(actor.objective, Coefficients(entropy=0.1), actor.parallel, len(rows))
        ours = actor._of_logprobs(loss)
        seen: list[torch.dtype] = []

        def eagerly(row: PackedBatch, index: Tensor, output: Tensor) -> Any:
            z = output[0, :, : actor.spec.vocab].float() / actor.temperature
            targets = local(row.targets, index=index, device=actor.parallel.device)
            logp = z.log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
            return loss(row, index, logp.gather(1, targets[:, None])[:, 0], entropy)

        def noting(row: PackedBatch, index: Tensor, output: Tensor) -> Any:
            seen.append(output.dtype)
            finish: OnOutput = eagerly if eager else ours
            return finish(row, index, output)

        actor.gradients(rows, noting)
        return {"gradients": gradients(actor), "dtypes": set(seen)}
    finally:
        parallel_state.destroy_model_parallel()
