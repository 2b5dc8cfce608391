"""The errors a user can meet. Each says which setting to change, what was found and what is
accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class MegarlError(Exception):
    """Base of every error this package raises on purpose; its text is meant for the user."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    Example: ``Problem("parallel.tp", "3", "a divisor of num_attention_heads=4 (1, 2, 4)")``
    """

    key: str
    found: str
    accepted: str

    def __str__(self) -> str:
        return f"{self.key}: found {self.found}; accepted: {self.accepted}"


class ConfigError(MegarlError, ValueError):
    """The configuration cannot be run. Carries every problem, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(
            f"{head} in the configuration:\n" + "\n".join(f"  - {p}" for p in problems)
        )


class DataError(MegarlError, ValueError):
    """Input data (prompts, checkpoints, rollouts) is damaged, missing or not what it claims."""


class ServerError(MegarlError, RuntimeError):
    """A rollout server did not answer, answered wrongly, or died."""


class NoAnswerError(ServerError):
    """A server did not answer a call by its deadline."""


class UnfitServerError(ServerError):
    """A rollout server answers, but another version, size or context of it is wanted."""


class SyncError(MegarlError, RuntimeError):
    """New weights did not reach a server whole. The server must not be used until a full push
    succeeds.
    """


class RunError(MegarlError, RuntimeError):
    """The run cannot go on: a rank, a server or the disk failed; names the first cause."""


class InstallError(MegarlError, ImportError):
    """A package of this environment is broken, or is another of the same name; says what to
    uninstall or install.
    """


LASTING = (ConfigError, DataError, InstallError, UnfitServerError)
"""What a restart does not mend: somebody has to change something first."""
