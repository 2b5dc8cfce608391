"""What workers do in tests of routers: optimizer steps, and what the routers did in them."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state

from megarl.actor import router_losses
from megarl.actor.actor import MegatronActor
from megarl.actor.expert_bias import routers_of
from megarl.actor.names import global_weights
from megarl.types import PackedBatch, Sample
from tests.actor.work import config_for, gradients, make_actor, prepare

NO_MINIBATCHES = {"algo": {"minibatches": 1}}


@dataclass(frozen=True)
class Case:
    """``passes``: log-prob passes before the step, besides the usual one. ``skipped``: steps before
    it, of the first row alone, whose gradients are made and not applied. ``pad``: tokens of padding
    that every row gets at its end. ``capacity``: of an expert, as upstream would drop by.
    """

    hf: Path
    samples: list[Sample]
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    passes: int = 0
    skipped: int = 0
    pad: int = 0
    capacity: float | None = None


def steps(rank: int, layout: dict[str, int], cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One optimizer step of every ``Case``: metrics, gradients (HF names, on the stage's sender),
    and on every rank the weights of its routers, before and after, by Megatron's global names.
    """
    return {name: _step(layout, Case(**case)) for name, case in cases.items()}


def _step(layout: dict[str, int], case: Case) -> dict[str, Any]:
    config = config_for(case.hf, **{**NO_MINIBATCHES, **case.sections})
    try:
        actor = make_actor(config, layout)
        if case.capacity is not None:
            for chunk in actor.model:
                for router in routers_of([chunk]):
                    router.config.moe_expert_capacity_factor = case.capacity
        before = _routers(actor)
        plan = prepare(actor, config, case.samples)
        for _ in range(case.passes):
            actor.logprobs(plan)
        rows = [padded(row, case.pad) for row in plan.steps[0]]
        for _ in range(case.skipped):
            actor.forward_backward(rows[:1])
            actor.update(skip=True)
        metrics, faults = actor.forward_backward(rows)
        assert not faults
        found = gradients(actor)
        actor.update()
        return {
            "metrics": [[m for m in metrics if m.name.startswith("moe/")]],
            "gradients": found,
            "weights": {},
            "routers": {"before": before, "after": _routers(actor)},
            "rows": len(rows),
        }
    finally:
        parallel_state.destroy_model_parallel()


def balancing_inputs(rank: int, hf: Path, samples: list[Sample]) -> list[tuple[Any, ...]]:
    """Of every call of upstream's balancing loss in a step: (dtype and number of tokens, dtype and
    sum of loads).
    """
    config = config_for(hf, **NO_MINIBATCHES, moe={"aux_loss_coeff": 0.5})
    seen, own = [], router_losses.switch_load_balancing_loss_func

    def watch(**given: Any) -> torch.Tensor:
        tokens, loads = given["total_num_tokens"], given["tokens_per_expert"]
        seen.append((str(tokens.dtype), int(tokens), str(loads.dtype), int(loads.sum())))
        return own(**given)

    try:
        actor = make_actor(config, {})
        rows = prepare(actor, config, samples).steps[0]
        with mock.patch.object(router_losses, "switch_load_balancing_loss_func", watch):
            actor.forward_backward(rows)
        return seen
    finally:
        parallel_state.destroy_model_parallel()


def _routers(actor: MegatronActor) -> dict[str, torch.Tensor]:
    named = global_weights(actor.model, actor.parallel)
    return {name: t.detach().clone() for name, t in named if ".router." in name}


def padded(row: PackedBatch, tokens: int) -> PackedBatch:
    """The row with ``tokens`` of padding, a segment of its own, at the end."""
    if not tokens:
        return row
    length = len(row.tokens)
    changed: dict[str, Any] = {
        "cu_seqlens": torch.cat([row.cu_seqlens, torch.tensor([length + tokens]).int()]),
        "lengths": torch.cat([row.lengths, torch.zeros(1, dtype=torch.int32)]),
    }
    for f in fields(row):
        value = getattr(row, f.name)
        if isinstance(value, torch.Tensor) and f.name not in changed:
            assert len(value) == length, f.name
            changed[f.name] = torch.cat([value, value.new_zeros(tokens, *value.shape[1:])])
    return replace(row, **changed)
