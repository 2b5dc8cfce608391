"""Response-length curriculum: short responses first, longer ones once those are learnt.

A stage (``rollout.length_stages``) ends after its ``until_step``, or when training has converged:
mean accuracy of its last ``window`` steps, minus that of the ``window`` steps before, is less than
``min_gain``. Only steps of the stage itself count. Every rank sees the same accuracies, so every
rank is in the same stage.

Source: Skywork-OR1, arXiv 2505.22312 (8k, 16k and 32k tokens).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.rollout import LengthStage
from megarl.errors import DataError


class LengthCurriculum:
    """Which stage the run is in. ``stages`` are checked by ``config/validate.py``."""

    def __init__(self, stages: Sequence[LengthStage]) -> None:
        assert stages, "a run has at least one stage"
        self._stages = tuple(stages)
        self.stage = 0
        self._accuracies: list[float] = []  # of the stage's steps, as far back as they matter

    @property
    def max_new_tokens(self) -> int:
        return self._stages[self.stage].max_new_tokens

    def update(self, step: int, accuracy: float) -> None:
        """Step ``step`` had this accuracy: the share of its samples that were right."""
        self._accuracies.append(accuracy)
        while self._over(step):  # the next stage's last step may have passed as well
            self.stage, self._accuracies = self.stage + 1, []
        converged = self._stages[self.stage].until_converged
        keep = 2 * converged.window if converged else 0
        self._accuracies = self._accuracies[-keep:] if keep else []

    def _over(self, step: int) -> bool:
        stage = self._stages[self.stage]
        if stage.until_step is not None:
            return step >= stage.until_step
        if stage.until_converged is None:
            return False
        window = stage.until_converged.window
        before, last = self._accuracies[-2 * window : -window], self._accuracies[-window:]
        gain = (math.fsum(last) - math.fsum(before)) / window
        return len(before) == window and gain < stage.until_converged.min_gain

    def state(self) -> dict[str, Any]:
        """As JSON: the stage and what has been seen of it."""
        return {
            "stage": self.stage,
            "max_new_tokens": self.max_new_tokens,
            "accuracies": list(self._accuracies),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on in a saved stage. Raises DataError when there is no such stage any more."""
        stage, tokens = int(state["stage"]), int(state["max_new_tokens"])
        now = [s.max_new_tokens for s in self._stages]
        if not 0 <= stage < len(now) or now[stage] != tokens:
            raise DataError(
                f"the checkpoint is in stage {stage + 1} of rollout.length_stages, with "
                f"{tokens} new tokens; the stages now have {', '.join(map(str, now))}"
            )
        self.stage, self._accuracies = stage, [float(a) for a in state["accuracies"]]
