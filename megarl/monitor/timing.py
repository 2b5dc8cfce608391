"""Where a step's time goes: ``with timer("rollout"): ...`` gives the metric ``time/rollout``.

Wall-clock seconds of this rank; several stretches of one phase in a step add up. After reduction
over ranks ``time/<phase>`` is the mean rank's time and ``time_max/<phase>`` the slowest one's.
Phases may nest: each counts its whole stretch. Work queued on a GPU counts where the host waits.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megarl.types import Max, Mean, Metric, StepMetrics


class PhaseTimer:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Also an interrupted stretch counts: what it took is what it took."""
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    def drain(self) -> StepMetrics:
        """The phases since the last call; starts over."""
        seconds, self._seconds = self._seconds, {}
        return [Metric(f"time/{phase}", Mean(s, 1.0)) for phase, s in seconds.items()] + [
            Metric(f"time_max/{phase}", Max(s)) for phase, s in seconds.items()
        ]
