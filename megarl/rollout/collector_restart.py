"""A collector whose process is started again when it dies (``on_failure.collectors``): its groups
are sampled anew, under their serials and seeds, and none is lost.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from megarl.errors import RunError
from megarl.rollout.collector import Collector
from megarl.types import GroupOutcome, GroupRequest, Member, Prompt, Sampling, StepMetrics

log = logging.getLogger(__name__)


class RestartingCollector:
    """``make`` starts a process. ``max_restarts`` 0: its first death is the last."""

    def __init__(self, make: Callable[[], Collector], max_restarts: int) -> None:
        self._make, self._left = make, max_restarts
        self._inner = make()
        self._serving: tuple[Sequence[Member], int] = ((), 0)
        self._out: dict[int, GroupRequest] = {}
        self._recalled = False
        self._lock = threading.Lock()  # servers may change while an evaluation starts it again
        self.reward_names: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        return self._inner.pid

    def serve_from(self, members: Sequence[Member], version: int = 0) -> None:
        with self._lock:
            self._serving = members, version
            self._inner.serve_from(members, version)

    def issue(self, requests: Sequence[GroupRequest]) -> None:
        self._out |= {request.serial: request for request in requests}
        self._inner.issue(requests)

    def wait(self, count: int, timeout_s: float) -> None:
        try:
            self._inner.wait(count, timeout_s)
        except RunError as error:
            self._restart(error)

    def take(self) -> list[GroupOutcome]:
        try:
            outcomes = self._inner.take()
        except RunError as error:
            self._restart(error)
            return []
        for outcome in outcomes:
            del self._out[outcome.serial]
        self.reward_names = self._inner.reward_names or self.reward_names
        return outcomes

    def suspects(self) -> dict[Member, str]:
        return self._inner.suspects()

    def recall(self) -> None:
        self._recalled = True
        try:
            self._inner.recall()
        except RunError as error:
            self._restart(error)

    def resume(self) -> None:
        self._recalled = False
        self._inner.resume()

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        area: str,
        samples_per_prompt: int = 1,
        pass_at: Sequence[int] = (),
    ) -> StepMetrics:
        while True:
            try:
                return self._inner.evaluate(
                    prompts,
                    sampling,
                    area=area,
                    samples_per_prompt=samples_per_prompt,
                    pass_at=pass_at,
                )
            except RunError as error:
                self._restart(error)

    def probe_routing(self, tokens: Sequence[int]) -> None:
        """``Collector.probe_routing``"""
        while True:
            try:
                return self._inner.probe_routing(tokens)
            except RunError as error:
                self._restart(error)

    def close(self) -> None:
        self._inner.close()

    def _restart(self, error: RunError) -> None:
        """Raises the newest error where no restart is left."""
        while True:
            self._inner.close()
            if not self._left:
                raise error
            self._left -= 1
            log.error("%s; it is started again (%d restarts are left)", error, self._left)
            with self._lock:
                self._inner = self._make()
                self._inner.serve_from(*self._serving)
            try:
                if self._recalled:
                    self._inner.recall()
            except RunError as e:
                error = e
                continue
            self._inner.issue(list(self._out.values()))
            return
