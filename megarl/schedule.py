"""When prompts are asked for, relative to the steps that train on their samples."""

from dataclasses import dataclass


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

    @property
    def first_come(self) -> bool:
        """Whether a step takes the groups that end first."""
        return self.over_sampling > 1 or not self.schedule.whole
