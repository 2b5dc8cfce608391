"""What becomes of a part that fails, where the settings leave it open."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megarl.config.rollout import Choice, OnFailureSection
from megarl.config.schema import Config

Part = Literal["servers", "collectors", "trainer"]


def on_failure(section: OnFailureSection, part: Part, environment: Mapping[str, str]) -> Choice:
    """``on_failure.{part}``, or where it is null: restart inside a Slurm allocation, else stop."""
    given = {
        "servers": section.servers,
        "collectors": section.collectors,
        "trainer": section.trainer,
    }[part]
    return given or ("restart" if environment.get("SLURM_JOB_ID") else "stop")


@dataclass(frozen=True)
class Launch:
    """What a launcher does besides starting the trainer ranks. ``restarts``: times that it starts
    them again. ``servers``: whether it starts the rollout servers (``megarl servers``), which then
    outlive the ranks.
    """

    restarts: int
    servers: bool


def launch_of(config: Config, environment: Mapping[str, str]) -> Launch:
    section, rollout = config.on_failure, config.rollout
    restarts = on_failure(section, "trainer", environment) == "restart" and section.max_restarts
    managed = config.run.mode == "rl" and not rollout.urls and not rollout.discover
    survive = on_failure(section, "servers", environment) == "restart"
    return Launch(int(restarts), bool(restarts and managed and survive))
