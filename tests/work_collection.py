"""Worker side of ``test_collection.py``: steps collected from made-up answers, on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megarl.books import Books
from megarl.collection import Collection
from megarl.data.prompts import PromptStream
from megarl.schedule import SCHEDULES, CollectionSettings
from megarl.servers import Servers
from megarl.types import (
    GroupOutcome,
    GroupRequest,
    Max,
    Mean,
    Member,
    Metric,
    Prompt,
    Sample,
    VersionSpan,
)

SAMPLES = 3
RESPONSE = 4  # tokens


class Scripted:
    """A collector whose answers are written down. ``answers[prompt id]``: a rightness a sample,
    None for one that never ended, or text: why the group failed. ``delays[prompt id]``: calls of
    ``take`` that it lasts. Tokens are of the weights ``version`` at the group's start and end.
    """

    def __init__(
        self,
        answers: Mapping[str, Any],
        delays: Mapping[str, int],
        names: Mapping[str, tuple[str, ...]],
        keeps: bool,
    ) -> None:
        self.answers, self.delays, self.names, self.keeps = answers, delays, names, keeps
        self.reward_names: tuple[str, ...] = ()
        self.issued: list[tuple[int, str, int, int]] = []
        self.temperatures: dict[int, float] = {}
        self.out: list[tuple[GroupRequest, int]] = []  # with the version it began under
        self.age: dict[int, int] = {}
        self.version, self.recalled, self.recalls, self.most = 0, False, 0, 0
        self.gone: list[GroupOutcome] = []

    def issue(self, requests: Sequence[GroupRequest]) -> None:
        for r in requests:
            self.issued.append((r.serial, r.prompt.id, r.step, r.sampling.max_new_tokens))
            self.temperatures[r.serial] = r.sampling.temperature
        self.out += [(r, self.version) for r in requests]
        self.most = max(self.most, len(self.out))

    def wait(self, count: int, timeout_s: float) -> None:
        assert count <= len(self.out) + len(self.gone)

    def take(self) -> list[GroupOutcome]:
        assert not self.recalled
        ended, self.gone = self.gone, []
        for request, began in list(self.out):
            serial = request.serial
            self.age[serial] = self.age.get(serial, 0) + 1
            if self.age[serial] > self.delays.get(request.prompt.id, 0):
                self.out.remove((request, began))
                ended.append(self._outcome(request, began))
        return ended[::-1]  # what comes last is told first: nothing may depend on it

    def suspects(self) -> dict[Member, str]:
        return {}

    def recall(self) -> None:
        self.recalled, self.recalls = True, self.recalls + 1
        if not self.keeps:
            self.gone += [GroupOutcome(r.serial, discarded=True) for r, _ in self.out]
            self.out.clear()

    def resume(self) -> None:
        self.recalled = False

    def _outcome(self, request: GroupRequest, began: int) -> GroupOutcome:
        answer = self.answers[request.prompt.id]
        if isinstance(answer, str):
            unscored = answer.startswith("data.reward")
            return GroupOutcome(request.serial, failed=answer, unscored=unscored)
        samples = tuple(
            self._sample(request, i, answer[i], began) for i in range(len(request.seeds))
        )
        return GroupOutcome(request.serial, samples)

    def _sample(self, request: GroupRequest, index: int, right: bool | None, began: int) -> Sample:
        if right is not None:
            self.reward_names = self.reward_names or self.names.get(request.prompt.id, ("reward",))
        rewards = [float(right or 0)] + [0.5] * (len(self.reward_names) - 1)
        length = len(request.prompt.token_ids) + RESPONSE
        spans = [VersionSpan(began, 0, 1, "server 0"), VersionSpan(self.version, 1, RESPONSE, "b")]
        return Sample(
            prompt_id=request.prompt.id,
            group=request.serial,
            index=index,
            tokens=np.full(length, request.seeds[index] % 97, np.int32),
            mask=np.arange(length) >= length - RESPONSE,
            rollout_logprobs=np.zeros(length, np.float32),
            rewards=np.asarray([0.0] if right is None else rewards, np.float32),
            correct=bool(right),
            truncated=right is None,
            version_spans=tuple(spans),
            serial=request.serial,
        )


class Steady(Servers):
    """One server, which never changes; ``dies``: once the weights have moved."""

    def __init__(self, *, dies: bool = False) -> None:
        self._serving = (Member("server 0", "http://nowhere", "0"),)
        self._dies = dies
        self.newcomers: list[bool] = []  # whether they were welcome, refresh by refresh

    def refresh(self, suspects: Mapping[Member, str], *, newcomers: bool = True) -> bool:
        self.newcomers.append(newcomers)
        if self._dies and not newcomers:
            self._serving = ()
        return not self._serving

    def pushed(self) -> None:
        self._serving = (Member("server 0", "http://nowhere", "1"),)


@dataclass
class Script:
    """Steps ``first`` to ``count`` of a run of ``total``; a ``first`` beyond 1 goes on from what an
    earlier call saved in ``folder``. ``ends``: the run is over then.
    """

    folder: str
    prompts: Sequence[Prompt]
    answers: Mapping[str, Any]
    collectors: Sequence[int]
    per_step: int
    count: int = 1
    first: int = 1
    samples: int = SAMPLES
    schedule: str = "synchronous"
    max_staleness: int = 1
    over_sampling: float = 1.0
    max_rounds: int | None = None
    tolerant: bool = False
    delays: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keeps: bool = True
    total: int | None = None
    ends: bool = True
    stops_in: int | None = None
    stops_after: int | None = None
    server_dies: bool = False
    temperature: float = 1.0
    decisive: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> CollectionSettings:
        return CollectionSettings(
            prompts_per_step=self.per_step,
            samples_per_prompt=self.samples,
            steps=self.total or self.count,
            temperature=self.temperature,
            seed=5,
            schedule=SCHEDULES[self.schedule],
            max_staleness=self.max_staleness,
            over_sampling=self.over_sampling,
            max_rounds=self.max_rounds,
            tolerant=self.tolerant,
            decisive=self.decisive,
        )


def steps(rank: int, **arguments: Any) -> dict[str, Any]:
    """A ``Script`` as this rank sees it."""
    script = Script(**arguments)
    assert dist.group.WORLD is not None
    collector = None
    if rank in script.collectors:
        collector = Scripted(script.answers, script.delays, script.names, script.keeps)
    stream = PromptStream(script.prompts, seed=0)
    folder = Path(script.folder)
    folder.mkdir(exist_ok=True)
    books = Books(folder / "books.jsonl" if rank == 0 else None)
    servers = Steady(dies=script.server_dies)
    about = (dist.group.WORLD, servers, books, script.settings())
    collection = Collection(stream, collector, script.collectors, *about)
    if script.first > 1:
        saved = _SAVED[script.folder]
        if collector is not None:
            collector.version = script.first - 1
        stream.load_state(saved["stream"])
        collection.max_new_tokens = 10 * script.first
        collection.load_state(saved["collection"], folder / "ready", script.first - 1)
    taken, error = [], None
    step = script.first - 1
    try:
        for step in range(script.first, script.count + 1):
            found = _step(collection, step, script)
            if found is None:
                step -= 1
                break
            taken.append(found)
            servers.pushed()
            if collector is not None:
                collector.version = step
        if script.ends:
            collection.finish(step)
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    collection.write_ready(folder / "ready", step)
    _SAVED[script.folder] = {"stream": stream.state(), "collection": collection.state()}
    return {
        "steps": taken,
        "error": error,
        "stream": stream.state(),
        "names": collection.reward_names,
        "issued": collector.issued if collector else [],
        "temperatures": collector.temperatures if collector else {},
        "recalls": collector.recalls if collector else 0,
        "most": collector.most if collector else 0,
        "counts": dict(books.counts),
        "newcomers": servers.newcomers,
    }


def _step(collection: Collection, step: int, script: Script) -> dict[str, Any] | None:
    collection.max_new_tokens = 10 * step
    found = collection.take(step, stopping=lambda: step == script.stops_in)
    if found is None:
        return None
    collection.max_new_tokens = 10 * (step + 1)
    collection.ask_ahead(step)
    collection.before_push(step, stopping=lambda: step == script.stops_after)
    return _plain(found)


_SAVED: dict[str, Any] = {}  # by folder; a rank's own, as books are


def _plain(found: Any) -> dict[str, Any]:
    return {
        "samples": [
            (c.facts.prompt_id, c.facts.group, c.facts.index, c.facts.serial) for c in found.samples
        ],
        "rewards": [c.facts.rewards.tolist() for c in found.samples],
        "tokens": [None if c.sample is None else c.sample.tokens.tolist() for c in found.samples],
        "versions": [min(s.version for s in c.facts.version_spans) for c in found.samples],
        "holders": [c.holder for c in found.samples],
        "accuracy": found.accuracy,
        "metrics": _values(found.metrics),
    }


def _values(metrics: Sequence[Metric]) -> dict[str, tuple[float, ...]]:
    return {
        m.name: tuple(vars(m.value).values()) for m in metrics if isinstance(m.value, Mean | Max)
    }
