"""What workers do in ``test_alignment.py``: one optimizer step on rows padded to a multiple."""

from pathlib import Path
from typing import Any

from megarl.actor.router import Router
from megarl.types import Sample
from tests.actor.work import by_sample, config_for, gradients, make_actor, prepare


def step(
    rank: int,
    hf: Path,
    layout: dict[str, int],
    samples: list[Sample],
    aligns: list[int],
    row_tokens: int,
    dtype: str,
) -> list[dict[str, Any]]:
    """For every alignment: which samples lie in which row and how long it is, log-probs before,
    metrics, gradients, and the true tokens that each layer's experts got.
    """
    return [_step(hf, {**layout, "align": n}, samples, row_tokens, dtype) for n in aligns]


def _step(
    hf: Path, layout: dict[str, int], samples: list[Sample], row_tokens: int, dtype: str
) -> dict[str, Any]:
    from megatron.core import parallel_state

    # Of rows that tp splits, the z loss is the mean of the parts' means (config/megatron.py): with
    # other parts, another number. Otherwise there is no such thing.
    moe = {"aux_loss_coeff": 0.5, "z_loss_coeff": 0.0 if "tp" in layout else 0.1}
    config = config_for(
        hf,
        **{"algo": {"minibatches": 1}, "train": {"row_tokens": row_tokens}},
        moe=moe,
        precision={"dtype": dtype},
    )
    actor = make_actor(config, layout)
    try:
        plan = prepare(actor, config, samples)
        (rows,) = plan.steps
        metrics, _ = actor.forward_backward(rows)
        counts = {
            layer.layer_number - 1: module.routed.clone()
            for chunk in actor.model
            for layer in chunk.module.modules()
            if hasattr(layer, "layer_number") and hasattr(layer, "mlp")
            for module in layer.modules()
            if isinstance(module, Router)
        }
        found = (pair for row in rows for pair in by_sample(row, actor.parallel))
        return {
            "rows": [(row.samples, len(row.tokens)) for row in rows],
            "logprobs": dict(found),
            "metrics": metrics,
            "gradients": {n: g.float() for n, g in gradients(actor).items()},
            "routed": counts,
            "share": len(rows[0].tokens) // (actor.parallel.mesh.cp * actor.parallel.mesh.tp),
        }
    finally:
        parallel_state.destroy_model_parallel()
