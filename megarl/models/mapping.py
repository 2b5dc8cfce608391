"""Megatron parameters <-> Hugging Face tensors: a table of rules, each read in both directions.

A rule says: this Megatron parameter is made of these HF tensors by this operator. An operator is
two inverse pairs, and all of them only move elements, so each way is exact bit for bit::

    HF tensors --to_megatron--> full parameter --split--> the shard of one tensor-parallel rank
    HF tensors <----to_hf------ full parameter <--merge-- all shards in rank order

Parameters are called by the names of a GPTModel that holds the whole model. Under pipeline or
expert parallelism a rank numbers its own layers and experts from 0; turning those into the global
layer and the global expert id is the caller's business (actor/names.py). Both spellings of
Megatron are understood: the local layer spec's, and Transformer Engine's with its fused layer norms
and grouped experts. Experts are split over the expert tensor-parallel ranks: where ``is_expert``
says so, the caller passes etp's rank and size as ``tp_rank`` and ``tp_size``. Splitting experts
over EP needs nothing: an expert is a parameter of its own.

Padding rows of the vocabulary exist only in Megatron: zero on import, dropped on export. Zero rows
give logit 0, not minus infinity: whoever computes a softmax must leave columns >= vocab out.

Letters: V vocabulary, H hidden, G KV groups, R query heads a group, D head dim, I an MLP's width.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from megarl.errors import DataError, Problem
from megarl.models.spec import FAMILIES, ModelSpec
from megarl.types import TensorSpec

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
        return shards[0] if self.axis is None else torch.cat(list(shards), self.axis)


@dataclass(frozen=True)
class Qkv:
    """q [G*R*D, H], k and v [G*D, H] <-> one matrix whose rows go group by group.

    ``linear_qkv = [q_0 .. q_R-1, k, v]`` of group 0, of group 1, ...; a rank owns whole groups.
    """

    sharded = True

    def to_megatron(self, tensors: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        grouped = [t.reshape(spec.kv_heads, -1, t.shape[-1]) for t in tensors]
        return torch.cat(grouped, 1).flatten(0, 1)

    def to_hf(self, tensor: Tensor, spec: ModelSpec) -> list[Tensor]:
        q = spec.heads // spec.kv_heads * spec.head_dim
        grouped = tensor.reshape(spec.kv_heads, q + 2 * spec.head_dim, tensor.shape[-1])
        parts = grouped.split([q, spec.head_dim, spec.head_dim], 1)
        return [part.flatten(0, 1) for part in parts]

    def split(self, tensor: Tensor, rank: int, size: int, spec: ModelSpec) -> Tensor:
        _check_divides(size, spec.kv_heads, "KV groups")
        return _part(tensor, rank, size, 0)

    def merge(self, shards: Sequence[Tensor], spec: ModelSpec) -> Tensor:
        return torch.cat(list(shards), 0)


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
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], 0)


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
        return torch.cat(list(shards), 0)


OPERATORS: dict[str, Callable[[int], Operator]] = {  # name in a table -> made for a padded vocab
    "replicated": lambda padded: Copy(REPLICATED),
    "column": lambda padded: Copy(COLUMN),
    "row": lambda padded: Copy(ROW),
    "qkv": lambda padded: Qkv(),
    "gate_up": lambda padded: GateUp(),
    "vocab": lambda padded: Vocab(padded),
}


@dataclass(frozen=True)
class Rule:
    """One line of a family's table.

    ``where``: model (once), layer (every layer), dense or moe (layers of that kind), expert (every
    expert of every MoE layer). ``{L}`` and ``{E}`` stand for the layer and the expert.
    ``megatron``: the spellings, any of which may occur. ``hf``: (name, dims), dims by ``dims_of``.
    ``tied_to``: the HF tensor that stands in when embeddings are tied; nothing is exported then.
    """

    where: Literal["model", "layer", "dense", "moe", "expert"]
    megatron: tuple[str, ...]
    hf: tuple[tuple[str, tuple[str, ...]], ...]
    operator: str
    tied_to: str | None = None


@dataclass(frozen=True)
class _Match:
    rule: Rule
    numbers: dict[str, int]  # {"L": 3, "E": 17}

    def hf(self, dims: dict[str, int]) -> list[tuple[str, tuple[int, ...]]]:
        return [(n.format(**self.numbers), tuple(dims[d] for d in ds)) for n, ds in self.rule.hf]


class ModelMapping:
    """The table of one model: a family's rules with this model's dimensions."""

    def __init__(self, spec: ModelSpec, rules: Sequence[Rule], padded_vocab: int) -> None:
        assert padded_vocab >= spec.vocab, (padded_vocab, spec.vocab)
        self.spec = spec
        self.rules = tuple(rules)
        self.padded_vocab = padded_vocab
        self._dims = dims_of(spec)

    def hf_names(self, name: str) -> tuple[str, ...]:
        """The HF tensors of parameter ``name``, in the order ``to_megatron`` takes them.

        Raises DataError for a parameter no rule knows.
        """
        match = self._match(name)
        if match.rule.tied_to and self.spec.tie_embeddings:
            return (match.rule.tied_to,)
        return tuple(hf for hf, _ in match.hf(self._dims))

    def exported(self, name: str) -> list[tuple[str, tuple[int, ...]]]:
        """(HF name, shape) of what ``to_hf(name, ...)`` returns; none for a tied output layer."""
        match = self._match(name)
        return [] if match.rule.tied_to and self.spec.tie_embeddings else match.hf(self._dims)

    def is_expert(self, name: str) -> bool:
        return self._match(name).rule.where == "expert"

    def is_sharded(self, name: str) -> bool:
        """False where every tensor-parallel rank holds the whole parameter (norms, the router)."""
        return self._operator(self._match(name)).sharded

    def to_megatron(
        self, name: str, hf_tensors: Sequence[Tensor], tp_rank: int = 0, tp_size: int = 1
    ) -> Tensor:
        """This rank's shard of parameter ``name``, from the tensors of ``hf_names(name)``.

        Raises DataError when a tensor has not the shape the configuration implies, or when
        ``tp_size`` does not divide the parameter.
        """
        match = self._match(name)
        names = self.hf_names(name)
        assert len(hf_tensors) == len(names), (name, names, len(hf_tensors))
        for hf, tensor, (_, shape) in zip(names, hf_tensors, match.hf(self._dims), strict=True):
            if tuple(tensor.shape) != shape:
                found, implied = list(tensor.shape), list(shape)
                raise DataError(f"{hf}: found shape {found}; config.json implies {implied}")
        operator = self._operator(match)
        full = operator.to_megatron(hf_tensors, self.spec)
        try:
            return operator.split(full, tp_rank, tp_size, self.spec).contiguous()
        except DataError as e:
            raise DataError(f"{name}: {e}") from e

    def to_hf(self, name: str, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """(HF name, whole tensor) pairs of one parameter, from its shards in tensor-parallel order.

        For a parameter that is not sharded one tensor is enough, the first is taken.
        """
        match = self._match(name)
        exported = self.exported(name)
        if not exported:
            return []
        operator = self._operator(match)
        tensors = operator.to_hf(operator.merge(shards, self.spec), self.spec)
        for (hf, shape), tensor in zip(exported, tensors, strict=True):
            assert tuple(tensor.shape) == shape, (name, hf, tuple(tensor.shape), shape, len(shards))
        return [(hf, t.contiguous()) for (hf, _), t in zip(exported, tensors, strict=True)]

    def hf_spec(self, dtype: str | None = None) -> list[TensorSpec]:
        """Every tensor of the model's HF checkpoint, in the order of the layers.

        ``dtype``: of the checkpoint meant; default the one config.json declares.
        """
        return [
            TensorSpec(name, shape, dtype or self.spec.dtype)
            for match in self._everything()
            if not (match.rule.tied_to and self.spec.tie_embeddings)
            for name, shape in match.hf(self._dims)
        ]

    def megatron_names(self, *, every_spelling: bool = False) -> list[str]:
        """Every parameter of the whole model, in each rule's first spelling or in all of them."""
        return [
            spelling.format(**match.numbers)
            for match in self._everything()
            for spelling in match.rule.megatron[: None if every_spelling else 1]
        ]

    def _everything(self) -> Iterator[_Match]:
        """Rules outside the layers keep their place in the table: before or after the layers."""
        in_layers = [rule for rule in self.rules if rule.where != "model"]
        first = self.rules.index(in_layers[0])
        yield from (_Match(rule, {}) for rule in self.rules[:first] if rule.where == "model")
        for layer, is_moe in enumerate(self.spec.moe_layers):
            absent = "dense" if is_moe else "moe"
            for rule in in_layers:
                if rule.where == "expert" and is_moe:
                    experts = range(self.spec.experts)
                    yield from (_Match(rule, {"L": layer, "E": e}) for e in experts)
                elif rule.where not in ("expert", absent):
                    yield _Match(rule, {"L": layer})
        yield from (_Match(rule, {}) for rule in self.rules[first:] if rule.where == "model")

    def _match(self, name: str) -> _Match:
        for pattern, rule in self._patterns:
            found = pattern.fullmatch(name)
            if found:
                return _Match(rule, {k: int(v) for k, v in found.groupdict().items()})
        raise DataError(f"no rule of family {self.spec.family} maps the Megatron parameter {name}")

    def _operator(self, match: _Match) -> Operator:
        return OPERATORS[match.rule.operator](self.padded_vocab)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(_pattern(s), rule) for rule in self.rules for s in rule.megatron]


def mapping_for(spec: ModelSpec, padded_vocab: int | None = None) -> ModelMapping:
    """The mapping of a model whose embedding has ``padded_vocab`` rows in Megatron."""
    rules = cast(tuple[Rule, ...], importlib.import_module(FAMILIES[spec.family]).RULES)
    return ModelMapping(spec, rules, padded_vocab or spec.vocab)


def padded_vocab_size(vocab: int, multiple: int) -> int:
    """``vocab`` rounded up. With the same ``multiple`` for every tp, checkpoints fit every tp."""
    return -(-vocab // multiple) * multiple


def layout_problems(spec: ModelSpec, tp: int, etp: int) -> list[Problem]:
    """What a tensor-parallel layout cannot split, all of it at once."""
    sizes = [
        ("parallel.tp", tp, "num_attention_heads", spec.heads),
        ("parallel.tp", tp, "num_key_value_heads", spec.kv_heads),
        ("parallel.tp", tp, "intermediate_size", 0 if all(spec.moe_layers) else spec.ffn),
        ("parallel.etp", etp, "moe_intermediate_size", spec.moe_ffn),
    ]
    return [Problem(k, str(n), f"a divisor of {what}={v}") for k, n, what, v in sizes if v % n]


def dims_of(spec: ModelSpec) -> dict[str, int]:
    """The words of the tables' dims."""
    return {
        "vocab": spec.vocab,
        "hidden": spec.hidden,
        "q": spec.heads * spec.head_dim,
        "kv": spec.kv_heads * spec.head_dim,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "moe_ffn": spec.moe_ffn,
        "experts": spec.experts,
    }


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template).replace(r"\{L\}", r"(?P<L>\d+)").replace(r"\{E\}", r"(?P<E>\d+)")
    return re.compile(escaped)


def _part(tensor: Tensor, rank: int, size: int, axis: int) -> Tensor:
    _check_divides(size, tensor.shape[axis], f"entries of dimension {axis}")
    return tensor.chunk(size, axis)[rank]


def _check_divides(size: int, total: int, what: str) -> None:
    if total % size:
        raise DataError(f"{total} {what} cannot be split over tensor-parallel size {size}")
