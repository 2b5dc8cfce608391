"""Ragged lists of response tokens <-> packed rows, as training packs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megarl.conformance.cases import Inputs, Unsupported
from megarl.data.packing import build_row, padded
from megarl.types import PackedBatch, Sample

Ragged = Sequence[Sequence[Any]]
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def vector(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """A list of a case in the precision asked for; rounded to it where it has fewer digits."""
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def rounded(values: Sequence[Any], dtype: torch.dtype) -> list[float]:
    """The same, for what stays on the host."""
    found: list[float] = vector(values, dtype).double().tolist()
    return found


@dataclass(frozen=True)
class Packed:
    """One row. ``where``: of every sample in it the row positions of its response tokens."""

    row: PackedBatch
    where: Mapping[int, slice]

    def put(self, ragged: Ragged, dtype: torch.dtype) -> torch.Tensor:
        """[T]: ``ragged[i][t]`` at its place, 0 at prompts and padding. Masked tokens keep what the
        case has there.
        """
        out = torch.zeros(len(self.row.mask), dtype=dtype)
        for i, place in self.where.items():
            out[place] = vector(ragged[i], dtype)
        return out

    def take(self, values_T: torch.Tensor) -> list[list[Any]]:
        """The inverse, by sample, for a row of all samples."""
        return [values_T[self.where[i]].tolist() for i in sorted(self.where)]


class Sequences:
    """The sequences of a case: ``mask``, ``prompt_len`` and ``groups`` of its inputs."""

    def __init__(self, inputs: Inputs, dtype: torch.dtype) -> None:
        self.inputs, self.dtype = inputs, dtype
        self.mask: Ragged = inputs["mask"]
        self.prompt_len: Sequence[int] = inputs.get("prompt_len") or [1] * len(self.mask)
        self.groups: Sequence[int] = inputs.get("groups") or [0] * len(self.mask)
        for name in ("prompt_len", "groups"):
            if len(getattr(self, name)) != len(self.mask):
                raise Unsupported(f"inputs.{name} and inputs.mask differ in length")
        if min(self.prompt_len, default=1) < 1:
            raise Unsupported("inputs.prompt_len has a 0: the first token is scored by no position")

    @property
    def all(self) -> list[int]:
        return list(range(len(self.mask)))

    @cached_property
    def trained(self) -> dict[int, int]:
        return {i: int(sum(part)) for i, part in enumerate(self.mask)}

    @property
    def group_of(self) -> dict[int, int]:
        return dict(enumerate(self.groups))

    def ragged(self, name: str, optional: bool = False) -> Ragged:
        """An input with a number for each token; 0 each where it may be missing and is."""
        if optional and self.inputs.get(name) is None:
            return [[0.0] * len(part) for part in self.mask]
        values: Ragged = self.inputs[name]
        if [len(part) for part in values] != [len(part) for part in self.mask]:
            raise Unsupported(f"inputs.{name} has not the shape of inputs.mask")
        return values

    def length(self, members: Sequence[int], multiple: int = 1) -> int:
        return sum(padded(self.prompt_len[i] + len(self.mask[i]), multiple) for i in members)

    def pack(
        self, members: Sequence[int], *, multiple: int = 1, length: int | None = None
    ) -> Packed:
        """The row of ``members``, in their order, with its log-probs before the update."""
        size = self.length(members, multiple) if length is None else length
        row = build_row(self.samples, members, length=size, segment_multiple=multiple)
        # Entry p of a row is about token p + 1 of its sequence.
        where = {
            i: slice(start + self.prompt_len[i] - 1, start + total - 1)
            for i, start, total in row.segments()
        }
        return Packed(row, where)

    def whole(self) -> Packed:
        """All of them in one row."""
        return self.pack(self.all)

    @cached_property
    def samples(self) -> list[Sample]:
        return [self._sample(i) for i in self.all]

    def _sample(self, i: int) -> Sample:
        prompt, length = self.prompt_len[i], self.prompt_len[i] + len(self.mask[i])
        return Sample(
            prompt_id=str(self.groups[i]),
            group=self.groups[i],
            index=i,
            tokens=np.zeros(length, np.int32),
            mask=np.array([False] * prompt + [bool(m) for m in self.mask[i]]),
            rollout_logprobs=np.zeros(length, np.float32),
            rewards=np.zeros(1, np.float32),
            correct=False,
            truncated=False,
        )
