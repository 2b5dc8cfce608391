"""What workers do in ``test_nonfinite.py``: one step on samples of which one is spoilt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.monitor.metrics import reduce_metrics
from tests.actor.work import config_for, make_actor, prepare
from tests.helpers.samples import random_samples


def step(rank: int, hf: Path, layout: dict[str, int], spoil: str, on_nonfinite: str) -> Any:
    """(how far the weights moved, metrics of this rank) or the error's text."""
    from megatron.core import parallel_state

    algo = {"policy": {"name": "gspo"}, "minibatches": 1, "old_logprobs": "rollout"}
    config = config_for(hf, algo=algo, train={"row_tokens": 96, "on_nonfinite": on_nonfinite})
    actor = make_actor(config, layout)
    try:
        samples = random_samples(4, 4, seed=2)
        if spoil == "sample":
            broken = samples[6].rollout_logprobs.copy()
            broken[np.flatnonzero(samples[6].mask)[0]] = np.nan
            samples[6] = replace(samples[6], rollout_logprobs=broken)
        if spoil == "mask":
            samples = [replace(s, mask=np.zeros_like(s.mask)) for s in samples]
        plan = prepare(actor, config, samples)
        if spoil == "gradient":
            _break_gradients(actor)
        before = [p.detach().clone() for chunk in actor.model for p in chunk.parameters()]
        metrics = actor.train(plan)
        after = [p for chunk in actor.model for p in chunk.parameters()]
        moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
        return moved, reduce_metrics([metrics])
    except FloatingPointError as e:
        return str(e)
    finally:
        parallel_state.destroy_model_parallel()


def _break_gradients(actor: Any) -> None:
    """An infinity in one gradient of rank 0, as an overflow in a backward pass leaves it."""
    if torch.distributed.get_rank() == 0:
        parameter = next(p for chunk in actor.model for p in chunk.parameters())
        parameter.register_hook(lambda grad: grad + float("inf"))
