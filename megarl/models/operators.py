"""How one Megatron parameter and its Hugging Face tensors turn into each other.

An operator is two inverse pairs that only move elements::

    HF tensors --to_megatron--> full parameter --split--> the shard of one tensor-parallel rank
    HF tensors <----to_hf------ full parameter <--merge-- all shards in rank order

Letters: V vocabulary, H hidden, G KV groups, R query heads a group, D head dim, I an MLP's width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megarl.errors import DataError
from megarl.models.spec import ModelSpec

Axis = Literal[0, 1] | None
COLUMN: Axis = 0  # output features are split
ROW: Axis = 1  # input features are split
REPLICATED: Axis = None


class Operator(Protocol):
    """How one Megatron parameter and its HF tensors turn into each other."""

    @property
    def sharded(self) -> bool:
        """Whether tensor parallelism splits the parameter; if not, every rank holds all of it."""
        ...

    def to_megatron(self, tensors: Sequence[Tensor], spec: ModelSpec) -> Tensor: ...

    def to_hf(self, tensor: Tensor, spec: ModelSpec) -> list[Tensor]: ...

    def split(self, tensor: Tensor, rank: int, size: int, spec: ModelSpec) -> Tensor: ...

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> Tensor: ...


@dataclass(frozen=True)
class Copy:
    """The same tensor on both sides, split along ``axis``."""

    axis: Axis

    @property
    def sharded(self) -> bool:
        return self.axis is not None

    def to_megatron(self, tensors: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return tensors[0]

    def to_hf(self, tensor: Tensor, spec: ModelSpec) -> list[Tensor]:
        return [tensor]

    def split(self, tensor: Tensor, rank: int, size: int, spec: ModelSpec) -> Tensor:
        return tensor if self.axis is None else _part(tensor, rank, size, self.axis)

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return shards[0] if self.axis is None else _joined(shards, self.axis)


@dataclass(frozen=True)
class Qkv:
    """q [G*R*D, H], k and v [G*D, H] <-> one matrix whose rows go group by group; biases likewise.

    ``linear_qkv = [q_0 .. q_R-1, k, v]`` of group 0, of group 1, ...; a rank owns whole groups.
    """

    sharded = True

    def to_megatron(self, tensors: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        grouped = [t.reshape(spec.kv_heads, -1, *t.shape[1:]) for t in tensors]
        return torch.cat(grouped, 1).flatten(0, 1)

    def to_hf(self, tensor: Tensor, spec: ModelSpec) -> list[Tensor]:
        q = spec.heads // spec.kv_heads * spec.head_dim
        grouped = tensor.reshape(spec.kv_heads, q + 2 * spec.head_dim, *tensor.shape[1:])
        parts = grouped.split([q, spec.head_dim, spec.head_dim], 1)
        return [part.flatten(0, 1) for part in parts]

    def split(self, tensor: Tensor, rank: int, size: int, spec: ModelSpec) -> Tensor:
        _check_divides(size, spec.kv_heads, "KV groups")
        return _part(tensor, rank, size, 0)

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return _joined(shards, 0)


@dataclass(frozen=True)
class GateUp:
    """gate [I, H], up [I, H] <-> fc1 [2I, H] = [gate; up]; a rank's shard is [its gate; its up]."""

    sharded = True

    def to_megatron(self, tensors: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return torch.cat(list(tensors), 0)

    def to_hf(self, tensor: Tensor, spec: ModelSpec) -> list[Tensor]:
        return list(tensor.chunk(2, 0))

    def split(self, tensor: Tensor, rank: int, size: int, spec: ModelSpec) -> Tensor:
        return torch.cat([_part(half, rank, size, 0) for half in tensor.chunk(2, 0)], 0)

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], 0)


@dataclass(frozen=True)
class Interleaved:
    """[H, 2I], columns gate_0, up_0, gate_1, ... <-> fc1 [2I, H] = [gate; up]; a bias [2I] too.
    Split as ``GateUp``.
    """

    sharded = True

    def to_megatron(self, tensors: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        rows = _swapped(tensors[0])
        return torch.cat([rows[0::2], rows[1::2]], 0)

    def to_hf(self, tensor: Tensor, spec: ModelSpec) -> list[Tensor]:
        return [_swapped(torch.stack(tensor.chunk(2, 0), 1).flatten(0, 1))]

    def split(self, tensor: Tensor, rank: int, size: int, spec: ModelSpec) -> Tensor:
        return GateUp().split(tensor, rank, size, spec)

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return GateUp().merge(shards, spec)


@dataclass(frozen=True)
class Transposed:
    """[in, out] <-> [out, in], split along ``axis`` of the latter."""

    axis: Axis
    sharded = True

    def to_megatron(self, tensors: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return _swapped(tensors[0])

    def to_hf(self, tensor: Tensor, spec: ModelSpec) -> list[Tensor]:
        return [_swapped(tensor)]

    def split(self, tensor: Tensor, rank: int, size: int, spec: ModelSpec) -> Tensor:
        return Copy(self.axis).split(tensor, rank, size, spec)

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return Copy(self.axis).merge(shards, spec)


@dataclass(frozen=True)
class Vocab:
    """[V, H] <-> [padded V, H], split by rows; the padding is zero and never leaves Megatron."""

    padded: int
    sharded = True

    def to_megatron(self, tensors: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        (tensor,) = tensors
        padding = tensor.new_zeros(self.padded - spec.vocab, *tensor.shape[1:])
        return torch.cat([tensor, padding], 0) if len(padding) else tensor

    def to_hf(self, tensor: Tensor, spec: ModelSpec) -> list[Tensor]:
        return [tensor[: spec.vocab]]

    def split(self, tensor: Tensor, rank: int, size: int, spec: ModelSpec) -> Tensor:
        return _part(tensor, rank, size, 0)

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return _joined(shards, 0)


OPERATORS: dict[str, Callable[[int], Operator]] = {  # name in a table -> made for a padded vocab
    "replicated": lambda padded: Copy(REPLICATED),
    "column": lambda padded: Copy(COLUMN),
    "row": lambda padded: Copy(ROW),
    "qkv": lambda padded: Qkv(),
    "gate_up": lambda padded: GateUp(),
    "interleaved": lambda padded: Interleaved(),
    "transposed_row": lambda padded: Transposed(ROW),
    "vocab": lambda padded: Vocab(padded),
}


def _swapped(tensor: Tensor) -> Tensor:
    """A matrix transposed; a bias as it is."""
    return tensor.transpose(0, -1)


def _joined(shards: Sequence[Tensor], axis: int) -> Tensor:
    """One shard is the whole: a copy of it would double what an export needs."""
    return torch.cat(list(shards), axis) if len(shards) > 1 else shards[0]


def _part(tensor: Tensor, rank: int, size: int, axis: int) -> Tensor:
    _check_divides(size, tensor.shape[axis], f"entries of dimension {axis}")
    return tensor.chunk(size, axis)[rank]


def _check_divides(size: int, total: int, what: str) -> None:
    if total % size:
        raise DataError(f"{total} {what} cannot be split over tensor-parallel size {size}")
