"""Worker side of test_experts.py."""

from pathlib import Path
from typing import Any

import torch

from megarl.types import Sample
from tests.actor.work import config_for, make_actor, prepare


def trained(
    rank: int, hf: Path, layout: dict[str, int], samples: list[Sample], sections: dict[str, Any]
) -> dict[str, Any]:
    """Old log-probs, and the dtypes of what the routers gave over one optimizer step."""
    from megatron.core import parallel_state

    config = config_for(hf, algo={"minibatches": 1}, **sections)
    actor = make_actor(config, layout)
    dtypes: set[torch.dtype] = set()
    try:
        for chunk in actor.model:
            for name, module in chunk.named_modules():
                if name.endswith(".router"):
                    module.register_forward_hook(lambda m, i, out: dtypes.add(out[0].dtype))
        plan = prepare(actor, config, samples)
        logprobs = [row.old_logprobs for row in plan.steps[0]]
        actor.train(plan)
        return {
            "logprobs": torch.cat(logprobs) if logprobs[0] is not None else None,
            "routed": dtypes,
        }
    finally:
        parallel_state.destroy_model_parallel()
