"""What workers do in ``test_replay*.py``: passes whose routing is replayed, looked at closely."""

from pathlib import Path
from typing import Any

from megarl.actor.actor import MegatronActor
from megarl.actor.load import load_hf_weights
from megarl.actor.names import unwrap
from megarl.actor.replay import RoutedPass
from megarl.models.hf_io import open_checkpoint
from megarl.types import PackedBatch, Sample, StepMetrics
from tests.actor.work import by_sample, config_for, gradients, make_actor, plan_for
from tests.actor.work_families import _weighted_sum

Sections = dict[str, dict[str, Any]]


def evaluate(
    rank: int,
    models: dict[str, Path],
    layouts: dict[str, dict[str, int]],
    samples: dict[str, list[Sample]],
    sections: Sections,
    moved: dict[str, Path] | None = None,
) -> dict[str, dict[str, Any]]:
    """Of every model, with the settings ``sections``: the old log-probs and the gradients of a
    weighted sum of log-probs. ``moved``: weights that the model has for the gradients.
    """
    return {
        name: _evaluate(folder, layouts[name], samples[name], sections, (moved or {}).get(name))
        for name, folder in models.items()
    }


def _evaluate(
    folder: Path,
    layout: dict[str, int],
    samples: list[Sample],
    sections: Sections,
    moved: Path | None,
) -> dict[str, Any]:
    from megatron.core import parallel_state

    actor, rows = planned(folder, layout, samples, sections)
    try:
        found = {i: values for row in rows for i, values in by_sample(row, actor.parallel)}
        if moved is not None:
            chunks = [unwrap(chunk) for chunk in actor.model]
            load_hf_weights(chunks, open_checkpoint(moved), actor.spec, actor.parallel)
        metrics = backward(actor, rows)
        return {
            "logprobs": found,
            "gradients": gradients(actor),
            "metrics": metrics,
            "rows": len(rows),
        }
    finally:
        parallel_state.destroy_model_parallel()


def planned(
    folder: Path, layout: dict[str, int], samples: list[Sample], sections: Sections
) -> tuple[MegatronActor, list[PackedBatch]]:
    """An actor and its rows, whose old log-probs are there."""
    given: Sections = {"algo": {"minibatches": 1}, "train": {"row_tokens": 48}}
    config = config_for(folder, **{**given, **sections})
    actor = make_actor(config, layout)
    plan = plan_for(actor, config, samples)
    actor.logprobs(plan)
    return actor, plan.steps[0]


def backward(actor: MegatronActor, rows: list[PackedBatch]) -> StepMetrics:
    """Gradients of the weighted sum, ready."""
    loss = actor._of_logprobs(_weighted_sum(actor, len(rows)))
    metrics, _ = actor.gradients(rows, loss, training_pass(actor, rows))
    return metrics


def training_pass(actor: MegatronActor, rows: list[PackedBatch]) -> RoutedPass | None:
    return actor.replay.training_pass(actor.model, rows) if actor.replay else None
