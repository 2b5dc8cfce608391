"""Worker side of test_fp8_learning.py: the demo's warm-up, and its losses as FP8 computes them."""

from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megarl.actor.actor import MegatronActor
from megarl.actor.fp8_emulated import Products, emulate_fp8
from megarl.actor.names import unwrap
from megarl.algos.control import Controllers
from megarl.config.fp8 import Fp8Section
from megarl.data.prompts import DemonstrationStream, load_demonstrations
from megarl.data.tokenizer import load_tokenizer
from megarl.experience import complete_plan
from megarl.parts import ranks_of
from megarl.types import TrainPlan
from tests.actor.work import config_for, make_actor, plan_for


def losses(
    rank: int, hf: Path, demonstrations: Path, steps: int, recipes: list[dict[str, Any]]
) -> list[list[float]]:
    """Of every step of training in bf16: the mean loss of its batch before the update, in bf16 and
    by every recipe, on the same weights.
    """
    config = config_for(
        hf,
        run={"mode": "sft"},
        precision={"dtype": "bf16"},
        algo={"policy": {"name": "sft"}, "minibatches": 1},
        optim={"lr": 3e-3, "weight_decay": 0.01, "warmup_steps": 20},
        train={"row_tokens": 4096},
    )
    actor = make_actor(config, {})
    actor.recompute_old = True  # which supervised runs have no use for
    try:
        samples = load_demonstrations(demonstrations, load_tokenizer(hf), 4096)
        stream = DemonstrationStream(samples, seed=0)
        found = []
        for _ in range(steps):
            batch = stream.take(128)
            plan = plan_for(actor, config, batch)
            found.append([_loss(actor, plan), *(_emulated(actor, plan, r) for r in recipes)])
            complete_plan(
                plan, batch, config, Controllers.of(config.algo), ranks_of(actor.parallel)
            )
            actor.train(plan)
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _emulated(actor: MegatronActor, plan: TrainPlan, recipe: dict[str, Any]) -> float:
    chunks = [unwrap(chunk) for chunk in actor.model]
    emulate_fp8(chunks, actor.parallel, Fp8Section(backend="emulated", **recipe))
    loss = _loss(actor, plan)
    for module in (m for chunk in chunks for m in chunk.modules()):
        if isinstance(getattr(module, "_forward_impl", None), Products):
            del module._forward_impl
    return loss


def _loss(actor: MegatronActor, plan: TrainPlan) -> float:
    actor.logprobs(plan)
    total = count = 0.0
    for row in plan.steps[0]:
        assert row.old_logprobs is not None
        total -= float(row.old_logprobs[row.mask].double().sum())
        count += int(row.mask.sum())
    return total / count
