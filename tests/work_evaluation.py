"""Worker side of ``test_evaluation.py``: an evaluation while servers come and go."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist

from megarl.config.schema import Config
from megarl.errors import MegarlError
from megarl.evaluation import Evaluations
from megarl.types import Max, Member, Metric, Prompt, StepMetrics
from tests.work_servers import Stage, WritingCollector

SECTIONS = {
    "run": {"dir": "unused", "steps": 10, "stop_grace_s": 2.0},
    "model": {"hf": "unused"},
    "data": {"heldout": "unused"},
    "eval": {"every": 2},
    "algo": {"policy": {"name": "gspo"}},
    "optim": {"lr": 1e-3},
}


@dataclass
class Evaluating(WritingCollector):
    """Its evaluations end once ``waits_for``, the boot of a server, may be asked."""

    waits_for: str = ""
    served: threading.Event = field(default_factory=threading.Event)

    def serve_from(self, members: Sequence[Member], version: int) -> None:
        super().serve_from(members, version)
        if any(m.boot == self.waits_for for m in members):
            self.served.set()

    def suspects(self) -> dict[Member, str]:
        return {}

    def evaluate(self, prompts: Sequence[Prompt], *rest: Any, area: str) -> StepMetrics:
        assert self.served.wait(60.0)
        return [Metric(f"{area}/samples", Max(len(prompts)))]


def evaluated(
    rank: int, waits_for: str, comes: bool, stops: bool, patience_s: float
) -> tuple[Any, float]:
    """(metrics, or what was raised; seconds). The only server dies soon; ``comes``: it is started
    again, a second later.
    """
    stage = Stage(rank, patience_s, collector=partial(Evaluating, waits_for=waits_for))
    stage.members("a1")
    stage.servers.push(4)
    for after_s, names in [(0.3, []), (1.0, ["a2"])][: 1 + comes]:
        threading.Timer(after_s, stage.members, names).start()
    prompts = [Prompt("p", (1, 2), {})]
    assert dist.group.WORLD is not None
    config = Config.model_validate(SECTIONS)
    evaluations = Evaluations(config, rank, dist.group.WORLD, lambda path, longest: prompts)
    asking: Any = stage.collector
    start = time.monotonic()
    found: Any
    try:
        metrics = evaluations.run(asking, stage.servers, 4, lambda: stops)
        found = [(m.name, m.value) for m in metrics]
    except MegarlError as e:
        found = f"{type(e).__name__}: {e}"
    return found, time.monotonic() - start
