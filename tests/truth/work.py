"""What ranks do in tests of truth: log-probs of the samples that a server gave."""

from typing import Any

import torch

from tests.actor.work import by_sample, config_for, make_actor, plan_for
from tests.truth.served import Question


def logprobs(
    rank: int, questions: list[Question], layout: dict[str, int]
) -> list[dict[int, torch.Tensor]]:
    """Of every question and sample, on the ranks that hold them: those of tokens 1..L-1."""
    return [_logprobs(question, layout) for question in questions]


def _logprobs(question: Question, layout: dict[str, int]) -> dict[int, torch.Tensor]:
    from megatron.core import parallel_state

    sections: dict[str, Any] = {
        "algo": {"minibatches": 1},
        "precision": {"dtype": question.dtype},
        "rollout": {"temperature": question.temperature},
        "moe": {"routing_replay": "rollout" if question.replay else "none"},
    }
    config = config_for(question.folder, **sections)
    actor = make_actor(config, layout)
    try:
        plan = plan_for(actor, config, question.samples)
        actor.logprobs(plan)
        rows = plan.steps[0]
        return {i: values for row in rows for i, values in by_sample(row, actor.parallel)}
    finally:
        parallel_state.destroy_model_parallel()
