"""When prompts are asked for, relative to the steps that train on their samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.config.schema import Config


@dataclass(frozen=True)
class Schedule:
    """``ahead``: prompts of later steps are out while a step trains. ``whole``: what a step asked
    for has ended before the weights change.
    """

    ahead: bool
    whole: bool


SCHEDULES = {
    "synchronous": Schedule(ahead=False, whole=True),
    "one_step_off": Schedule(ahead=True, whole=True),
    "asynchronous": Schedule(ahead=True, whole=False),
}


def decisive_settings(config: Config) -> dict[str, Any]:
    """By name, as JSON: what decides what a sample is, so that those of a run with other values are
    not trained as if they were of this one.
    """
    rollout, replays = config.rollout, config.moe.routing_replay == "rollout"
    return {
        "rollout.temperature": rollout.temperature,
        "rollout.max_new_tokens": [stage.max_new_tokens for stage in rollout.stages],
        "rollout.mask_continued": rollout.mask_continued,
        "moe.routing_replay": "rollout" if replays else "without rollout",
        "data.reward": config.data.reward,
    }


@dataclass(frozen=True)
class CollectionSettings:
    """What a run's settings say about collecting."""

    prompts_per_step: int
    samples_per_prompt: int
    steps: int  # of the run
    temperature: float
    seed: int
    schedule: Schedule
    max_staleness: int
    over_sampling: float = 1.0
    max_rounds: int | None = None  # of dynamic sampling; None: every group will do
    tolerant: bool = False  # of groups that servers failed: others take their place
    decisive: Mapping[str, Any] = field(default_factory=dict)  # ``decisive_settings``

    @property
    def first_come(self) -> bool:
        """Whether a step takes the groups that end first."""
        return self.over_sampling > 1 or not self.schedule.whole
