"""How one Megatron parameter and its Hugging Face tensors turn into each other.

They hold the same elements in another order. An operator says where a parameter has them: its
``views`` are the parameter's own memory, seen as its HF tensors. Filling the views makes the
parameter of the tensors, reading them makes the tensors of the parameter. A shard of one
tensor-parallel rank has views like the whole, of its spans of the HF tensors.

Letters: V vocabulary, H hidden, G KV groups, R query heads a group, D head dim, I an MLP's width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megarl.errors import DataError
from megarl.models.spec import ModelSpec

Shape = tuple[int, ...]
Span = tuple[int, int]  # [begin, end) of a dimension
ROWS, COLUMNS, LAST = 0, 1, -1


@dataclass(frozen=True)
class Operator:
    """One HF tensor, which is the parameter. ``axis``: of HF tensors, along which tensor
    parallelism splits them; None where every rank holds all of them.
    """

    axis: int | None

    def span(self, size: int, rank: int, ranks: int) -> Span:
        """What rank ``rank`` of ``ranks`` has of the ``size`` entries of ``axis``. Raises DataError
        where they cannot be split so.
        """
        return _even(size, rank, ranks, "entries")

    def shape(self, hf: Sequence[Shape], ranks: int) -> Shape:
        """Of the parameter, or of one rank's shard, that HF tensors or spans of them make whose
        shapes are ``hf``.
        """
        return hf[0]

    def views(self, parameter: Tensor, hf: Sequence[Shape]) -> list[Tensor]:
        """Of the parameter or a shard: the elements of its HF tensors in their order, reshaped to
        ``hf`` the tensors themselves.
        """
        return [parameter]


@dataclass(frozen=True)
class Qkv(Operator):
    """q [G*R*D, H], k and v [G*D, H] <-> one matrix whose rows go group by group; biases likewise.

    ``linear_qkv = [q_0 .. q_R-1, k, v]`` of group 0, of group 1, ...; a rank owns whole groups.
    """

    head_dim: int

    def span(self, size: int, rank: int, ranks: int) -> Span:
        begin, end = _even(size // self.head_dim, rank, ranks, "heads")
        return begin * self.head_dim, end * self.head_dim

    def shape(self, hf: Sequence[Shape], ranks: int) -> Shape:
        return (sum(rows for rows, *_ in hf), *hf[0][1:])

    def views(self, parameter: Tensor, hf: Sequence[Shape]) -> list[Tensor]:
        groups = hf[1][0] // self.head_dim
        rows = [count // groups for count, *_ in hf]
        return list(parameter.view(groups, sum(rows), *hf[0][1:]).split(rows, 1))


class GateUp(Operator):
    """gate [I, H], up [I, H] <-> fc1 [2I, H] = [gate; up]; a rank's shard is [its gate; its up]."""

    def shape(self, hf: Sequence[Shape], ranks: int) -> Shape:
        return (2 * hf[0][0], *hf[0][1:])

    def views(self, parameter: Tensor, hf: Sequence[Shape]) -> list[Tensor]:
        return list(parameter.chunk(2, 0))


class Interleaved(Operator):
    """[H, 2I], columns gate_0, up_0, gate_1, ... <-> fc1 [2I, H] = [gate; up]; a bias [2I] too.
    Split as ``GateUp``.
    """

    def span(self, size: int, rank: int, ranks: int) -> Span:
        begin, end = _even(size // 2, rank, ranks, "pairs of gate and up")
        return 2 * begin, 2 * end

    def shape(self, hf: Sequence[Shape], ranks: int) -> Shape:
        return hf[0][::-1]

    def views(self, parameter: Tensor, hf: Sequence[Shape]) -> list[Tensor]:
        halves = parameter.view(2, -1, *parameter.shape[1:])
        return [halves.transpose(0, -1)]


class Transposed(Operator):
    """[in, out] <-> [out, in]."""

    def shape(self, hf: Sequence[Shape], ranks: int) -> Shape:
        return hf[0][::-1]

    def views(self, parameter: Tensor, hf: Sequence[Shape]) -> list[Tensor]:
        return [parameter.transpose(0, -1)]


@dataclass(frozen=True)
class Vocab(Operator):
    """[V, H] <-> [padded V, H], split by rows; the padding never leaves Megatron."""

    padded: int

    def span(self, size: int, rank: int, ranks: int) -> Span:
        begin, end = _even(self.padded, rank, ranks, "entries")
        return min(begin, size), min(end, size)

    def shape(self, hf: Sequence[Shape], ranks: int) -> Shape:
        return (self.padded // ranks, *hf[0][1:])

    def views(self, parameter: Tensor, hf: Sequence[Shape]) -> list[Tensor]:
        return [parameter[: hf[0][0]]]


# Name in a table -> made for a model whose embedding has so many rows in Megatron
OPERATORS: dict[str, Callable[[ModelSpec, int], Operator]] = {
    "replicated": lambda spec, padded: Operator(None),
    "column": lambda spec, padded: Operator(ROWS),
    "row": lambda spec, padded: Operator(COLUMNS),
    "qkv": lambda spec, padded: Qkv(ROWS, spec.head_dim),
    "gate_up": lambda spec, padded: GateUp(ROWS),
    "interleaved": lambda spec, padded: Interleaved(LAST),
    "transposed_row": lambda spec, padded: Transposed(ROWS),
    "vocab": lambda spec, padded: Vocab(ROWS, padded),
}


def _even(size: int, rank: int, ranks: int, what: str) -> Span:
    if size % ranks:
        raise DataError(f"{size} {what} cannot be split over tensor-parallel size {ranks}")
    return rank * (size // ranks), (rank + 1) * (size // ranks)
