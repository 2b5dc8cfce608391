"""Worker side of ``test_rounds.py``: steps sampled with made-up answers, on every rank."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from megarl.data.prompts import PromptStream
from megarl.rounds import Rounds
from megarl.types import Max, Mean, Metric, Prompt, Rollouts, Sample


class Scripted:
    """A collector whose answers are written down: ``answers[prompt id]`` is a rightness a sample,
    None for one that never ended. ``names``: of the reward's components, by prompt id.
    """

    def __init__(
        self, answers: Mapping[str, Sequence[bool | None]], names: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.answers, self.names = answers, names
        self.known: tuple[str, ...] = ()
        self.calls: list[tuple[list[str], list[str], int]] = []

    def collect(
        self,
        prompts: Sequence[Prompt],
        step: int,
        max_new_tokens: int,
        *,
        earlier: Sequence[Prompt] = (),
    ) -> Rollouts:
        self.calls.append(([p.id for p in prompts], [p.id for p in earlier], max_new_tokens))
        if any(p.id == "broken" for p in prompts):
            raise ValueError("no answer")
        samples = [
            self._sample(prompt, group, index, right)
            for group, prompt in enumerate(prompts)
            for index, right in enumerate(self.answers[prompt.id])
        ]
        count = len(samples)
        metrics = [Metric("rollout/accuracy", Mean(sum(s.correct for s in samples), count))]
        return Rollouts(samples, metrics, self.known, seconds=1.5)

    def _sample(self, prompt: Prompt, group: int, index: int, right: bool | None) -> Sample:
        if right is not None:
            self.known = self.known or self.names.get(prompt.id, ("reward",))
        rewards = [float(right or 0)] + [0.5] * (len(self.known) - 1)
        return Sample(
            prompt_id=prompt.id,
            group=group,
            index=index,
            tokens=np.asarray(prompt.token_ids, np.int32),
            mask=np.zeros(len(prompt.token_ids), bool),
            rollout_logprobs=np.zeros(len(prompt.token_ids), np.float32),
            rewards=np.asarray([0.0] if right is None else rewards, np.float32),
            correct=bool(right),
            truncated=right is None,
        )


def steps(
    rank: int,
    prompts: Sequence[Prompt],
    answers: Mapping[str, Sequence[bool | None]],
    collectors: Sequence[int],
    per_step: int,
    max_rounds: int | None,
    count: int = 1,
    names: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, Any]:
    """``count`` steps; what came of each, and where the prompts are then."""
    assert dist.group.WORLD is not None
    collector = Scripted(answers, names or {}) if rank in collectors else None
    stream = PromptStream(prompts, seed=0)
    rounds = Rounds(
        stream,
        collector,
        collectors,
        dist.group.WORLD,
        prompts_per_step=per_step,
        max_rounds=max_rounds,
    )
    taken = []
    error = None
    try:
        for step in range(1, count + 1):
            found = rounds.take(step, 10 * step)
            taken.append(
                {
                    "samples": [
                        (c.facts.prompt_id, c.facts.group, c.facts.index, c.facts.correct)
                        for c in found.samples
                    ],
                    "rewards": [c.facts.rewards.tolist() for c in found.samples],
                    "held": [
                        (c.holder, None if c.sample is None else c.sample.prompt_id)
                        for c in found.samples
                    ],
                    "accuracy": found.accuracy,
                    "metrics": _values(found.metrics),
                }
            )
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    return {
        "steps": taken,
        "error": error,
        "state": stream.state(),
        "names": rounds.reward_names,
        "calls": collector.calls if collector else [],
    }


def _values(metrics: Sequence[Metric]) -> list[tuple[str, tuple[float, ...]]]:
    assert all(isinstance(m.value, Mean | Max) for m in metrics)
    return [(m.name, tuple(vars(m.value).values())) for m in metrics]
