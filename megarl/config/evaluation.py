"""Settings of evaluations: prompts that are never trained on."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from megarl.config.section import NonNegative, Positive, Section


class EvalSet(Section):
    """Prompts that are never trained on, and how they are answered."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$")]
    """Metrics are ``eval/NAME/*``."""
    prompts: Path
    """JSON Lines, as data.prompts."""
    every: Positive | None = None
    """Steps between evaluations; null: as eval.every."""
    samples_per_prompt: Positive = 1
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the most likely tokens, as few as have this probability together."""
    top_k: Positive | None = None
    """Of the most likely tokens, so many."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Only tokens of at least this share of the likeliest one's probability."""
    max_new_tokens: Positive | None = None
    """Null: as eval.max_new_tokens."""
    pass_at: tuple[int, ...] = ()
    """For each k: ``eval/NAME/pass@k``, the chance that one of k samples is right, without bias
    from all samples of a prompt (Chen et al., Evaluating Large Language Models Trained on Code,
    arXiv:2107.03374, section 2.1).
    """


class EvalSection(Section):
    every: NonNegative = 0
    """Steps between held-out evaluations (greedy, by the rollout server); 0: never."""
    max_new_tokens: Positive = 24
    sets: tuple[EvalSet, ...] = ()
    """Further sets, each with sampling of its own."""
