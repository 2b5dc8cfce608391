"""What becomes of a part that fails, where the settings leave it open."""

from collections.abc import Mapping
from typing import Literal

from megarl.config.rollout import Choice, OnFailureSection

Part = Literal["servers", "collectors", "trainer"]


def on_failure(section: OnFailureSection, part: Part, environment: Mapping[str, str]) -> Choice:
    """`on_failure.{part}`, or where it is null: restart inside a Slurm allocation, else stop."""
    given: Choice | None = getattr(section, part)
    return given or ("restart" if environment.get("SLURM_JOB_ID") else "stop")
