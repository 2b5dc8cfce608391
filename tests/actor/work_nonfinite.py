"""What workers do in ``test_nonfinite.py``: one step on samples of which one is spoilt."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.data.kept_rows import read_rows
from megarl.monitor.metrics import reduce_metrics
from megarl.types import Sample
from tests.actor.work import config_for, make_actor, prepare
from tests.helpers.samples import random_samples

SPOILT = 6  # the sample whose numbers are broken
STEP = 12


def step(
    rank: int,
    hf: Path,
    layout: dict[str, int],
    spoil: str,
    on_nonfinite: str,
    folder: Path,
    keep_in: Path | None = None,
    minibatches: int = 1,
) -> Any:
    """(how far the weights moved, metrics of this rank, its rows) or the error's text."""
    from megatron.core import parallel_state

    config = config_for(
        hf,
        run={"dir": folder},
        algo={
            "policy": {"name": "gspo"},
            "minibatches": minibatches,
            "old_logprobs": "rollout",
            "overlong_filter": spoil == "truncated",
        },
        train={"row_tokens": 96, "on_nonfinite": on_nonfinite},
    )
    actor = make_actor(config, layout)
    if keep_in is not None:
        actor.keep_in = keep_in
    try:
        samples = random_samples(4, 4, seed=2)
        plan = prepare(actor, config, SAMPLES.get(spoil, list)(samples))
        plan.step = STEP
        ACTORS.get(spoil, lambda actor: None)(actor)
        before = [p.detach().clone() for chunk in actor.model for p in chunk.parameters()]
        metrics = actor.train(plan)
        after = [p for chunk in actor.model for p in chunk.parameters()]
        moved = max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True))
        return moved, reduce_metrics([metrics]), [vars(row) for row in plan.steps[0]]
    except FloatingPointError as e:
        return str(e)
    finally:
        parallel_state.destroy_model_parallel()


def run_again(rank: int, hf: Path, path: Path, parameter: bool) -> list[int]:
    """Kept rows in another actor, on one rank: the samples that are found in them."""
    from megatron.core import parallel_state

    config = config_for(hf, algo={"policy": {"name": "gspo"}, "old_logprobs": "rollout"})
    actor = make_actor(config, {})
    try:
        if parameter:
            _break_parameter(actor)
        _, faults = actor.forward_backward(read_rows(path).rows)
        return sorted({i for fault in faults for i in fault.samples})
    finally:
        parallel_state.destroy_model_parallel()


def _number(value: float) -> Callable[[list[Sample]], list[Sample]]:
    """In one trained token of the rollout's log-probs."""

    def spoil(samples: list[Sample]) -> list[Sample]:
        broken = samples[SPOILT].rollout_logprobs.copy()
        broken[np.flatnonzero(samples[SPOILT].mask)[0]] = value
        samples[SPOILT] = replace(samples[SPOILT], rollout_logprobs=broken)
        return samples

    return spoil


def _unmasked(groups: set[int]) -> Callable[[list[Sample]], list[Sample]]:
    return lambda samples: [
        s if s.group in groups else replace(s, mask=np.zeros_like(s.mask)) for s in samples
    ]


def _break_gradients(actor: Any) -> None:
    """An infinity in one gradient of rank 0, as an overflow in a backward pass leaves it."""
    if torch.distributed.get_rank() == 0:
        parameter = next(p for chunk in actor.model for p in chunk.parameters())
        parameter.register_hook(lambda grad: grad + float("inf"))


def _break_parameter(actor: Any) -> None:
    """In the first stage, from where it reaches every token."""
    with torch.no_grad():
        for chunk in actor.model:
            for name, p in chunk.named_parameters():
                if name.endswith("layers.0.input_layernorm.weight") and actor.parallel.at.pp == 0:
                    p[0] = torch.nan


SAMPLES: dict[str, Callable[[list[Sample]], list[Sample]]] = {
    "nan": _number(np.nan),
    "inf": _number(np.inf),
    "-inf": _number(-np.inf),
    "mask": _unmasked(set()),
    "truncated": lambda samples: [replace(s, truncated=True) for s in samples],
    "mask of a minibatch": _unmasked({2, 3}),
}
ACTORS: dict[str, Callable[[Any], None]] = {
    "gradient": _break_gradients,
    "parameter": _break_parameter,
}
