"""The groups of a run that have not ended: out with collectors, or ready for a step to train on.

Part of a checkpoint: ``state`` as JSON, and the ready samples in files of the form of recorded
rollouts, one of every collector.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megarl.data.exchange import Collected, share_facts
from megarl.data.recorded import most_bytes, read_samples, recorded_path, write_samples
from megarl.errors import DataError
from megarl.hostcomm import agree
from megarl.schedule import CollectionSettings
from megarl.types import GroupRequest, Prompt, Sample, Sampling


@dataclass(frozen=True)
class Left:
    """What a checkpoint had of groups that had not ended."""

    out: list[GroupRequest]  # nobody samples them yet
    expired: dict[str, list[int]]  # serials by the reason
    changed: dict[str, str]  # decisive settings with other values now -> what became of which


@dataclass
class Stock:
    """The same on every rank, but for the samples: those are with the rank that collected them."""

    serial: int = 0  # of the next group
    out: dict[int, GroupRequest] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)  # rank of each group that is out
    ready: dict[int, list[Collected]] = field(default_factory=dict)
    came: set[int] = field(default_factory=set)  # those ready since the last step took its groups

    def arrive(self, collected: Iterable[Collected]) -> None:
        """Groups that were out; all of each."""
        for c in collected:
            serial = c.facts.serial
            self.ready.setdefault(serial, []).append(c)
            self.came.add(serial)
            self.withdraw(serial)

    def withdraw(self, serial: int) -> GroupRequest | None:
        self.holders.pop(serial, None)
        return self.out.pop(serial, None)

    def drop(self, serials: Iterable[int]) -> None:
        """They are ready no more."""
        for serial in serials:
            del self.ready[serial]
            self.came.discard(serial)

    def clear(self) -> None:
        for things in (self.out, self.holders, self.ready, self.came):
            things.clear()

    def with_rank(self, rank: int) -> list[GroupRequest]:
        """What is out there."""
        return [r for serial, r in self.out.items() if self.holders[serial] == rank]

    # ---- in checkpoints ----------------------------------------------------------------------

    def state(self, decisive: Mapping[str, Any]) -> dict[str, Any]:
        """``decisive``: the settings that decided what these groups are, by name."""
        return {
            "decisive": dict(decisive),
            "serial": self.serial,
            "out": [_plain(request) for request in self.out.values()],
            "ready": sorted(self.ready),
            "came": sorted(self.came),
        }

    @property
    def num_bytes(self) -> int:
        """Of what ``write_ready`` writes, all together, at most."""
        return most_bytes([c.facts for group in self.ready.values() for c in group])

    def write_ready(
        self, folder: Path, step: int, collectors: Sequence[int], host: dist.ProcessGroup
    ) -> None:
        """Every collector what it holds. Collective over ``host``."""
        error: Exception | None = None
        rank = dist.get_rank()
        if rank in collectors:
            here = [c.sample for s in sorted(self.ready) for c in self.ready[s] if c.sample]
            path = recorded_path(folder, step, collectors.index(rank), len(collectors))
            try:
                write_samples(path, here)
            except OSError as e:
                error = e
        agree(error, host, f"writing the samples that are left over to {folder}")

    def load(
        self,
        state: Mapping[str, Any],
        folder: Path,
        step: int,
        prompts: Mapping[str, Prompt],
        settings: CollectionSettings,
        sampling: Sampling,
        collectors: Sequence[int],
        host: dist.ProcessGroup,
    ) -> Left:
        """What ``state`` and ``write_ready`` kept, whatever collectors there are now, without the
        groups that are not as ``settings`` want them. Where these changed what a sample is, the
        groups that were out are to be sampled anew by ``sampling``. Collective over ``host``.
        Raises DataError.
        """
        error: Exception | None = None
        mine: list[Sample] = []
        rank = dist.get_rank()
        if rank in collectors and state["ready"]:
            try:
                samples = [s for path in _parts(folder, step) for s in read_samples(path)]
                mine = _share(samples, state["ready"], collectors.index(rank), len(collectors))
            except DataError as e:
                error = e
        agree(error, host, f"reading the samples that were left over in {folder}")
        self.serial = int(state["serial"])
        self.arrive(share_facts(mine, collectors, rank, host))
        self.came = {int(serial) for serial in state["came"]}
        out = [_request(plain, prompts) for plain in state["out"]]
        now = settings.decisive
        changed = _changes(state.get("decisive", now), now)  # older ones have none
        if changed:
            out = [replace(request, sampling=sampling) for request in out]
        size, expired = settings.samples_per_prompt, dict[str, list[int]]()
        other = [serial for serial, group in self.ready.items() if len(group) != size]
        if resized := [*other, *(r.serial for r in out if len(r.seeds) != size)]:
            expired["data.samples_per_prompt has changed"] = resized
        self.drop(other)
        if changed and self.ready:
            expired[", ".join(changed.values())] = sorted(self.ready)
            self.drop(list(self.ready))
        return Left([r for r in out if len(r.seeds) == size], expired, changed)


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{name} was {was.get(name)}, is {value}"
        for name, value in now.items()
        if was.get(name) != value
    }


def _parts(folder: Path, step: int) -> list[Path]:
    """The file of the step; of several the first, by which all are read."""
    return sorted(folder.glob(f"step_{step}.npz")) + sorted(folder.glob(f"step_{step}.1-of-*.npz"))


def _share(samples: Sequence[Sample], serials: Sequence[int], k: int, of: int) -> list[Sample]:
    """Every ``of``-th group, from the ``k``-th on. Raises DataError where one is missing."""
    missing = set(serials) - {s.serial for s in samples}
    if missing:
        raise DataError(f"the checkpoint lacks the samples of groups {sorted(missing)[:5]}")
    wanted = set(sorted(serials)[k::of])
    return [s for s in samples if s.serial in wanted]


def _plain(request: GroupRequest) -> dict[str, Any]:
    return {
        "serial": request.serial,
        "step": request.step,
        "prompt": request.prompt.id,
        "seeds": list(request.seeds),
        "temperature": request.sampling.temperature,
        "max_new_tokens": request.sampling.max_new_tokens,
    }


def _request(plain: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> GroupRequest:
    if plain["prompt"] not in prompts:
        raise DataError(f"data.prompts has no prompt {plain['prompt']!r}, which the run had asked")
    return GroupRequest(
        serial=int(plain["serial"]),
        step=int(plain["step"]),
        prompt=prompts[plain["prompt"]],
        seeds=tuple(map(int, plain["seeds"])),
        sampling=Sampling(float(plain["temperature"]), int(plain["max_new_tokens"])),
    )
