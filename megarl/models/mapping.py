"""Megatron parameters <-> Hugging Face tensors: a table of rules, each read in both directions.

A rule says: this Megatron parameter is made of these HF tensors by this operator
(``operators.py``); operators only move elements, so each way is exact bit for bit.

Parameters are called by the names of a GPTModel that holds the whole model. Under pipeline or
expert parallelism a rank numbers its own layers and experts from 0; turning those into the global
layer and the global expert id is the caller's business (actor/names.py). Both spellings of
Megatron are understood: the local layer spec's, and Transformer Engine's with its fused layer norms
and grouped experts. Experts are split over the expert tensor-parallel ranks: where ``is_expert``
says so, the caller passes etp's rank and size as ``tp_rank`` and ``tp_size``. Splitting experts
over EP needs nothing: an expert is a parameter of its own.

Multi-token prediction layer k is ``mtp.layers.{k}`` in Megatron and layer ``num_hidden_layers + k``
in files. Its transformer layer follows the rules of the others; what only it has, has rules of its
own (``where="mtp"``). It shares the embedding and the head, of which files hold ``copies``.

Padding rows of the vocabulary exist only in Megatron: zero on import, dropped on export. Zero rows
give logit 0, not minus infinity: whoever computes a softmax must leave columns >= vocab out.
"""

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, cast

import torch
from torch import Tensor

from megarl.errors import DataError, Problem
from megarl.models.operators import OPERATORS, Operator
from megarl.models.parts import Mla
from megarl.models.spec import FAMILIES, ModelSpec
from megarl.types import TensorSpec

# Of the embedding's rows in training. By the model, not by tp: a checkpoint then fits every layout
# whose tp divides it.
VOCAB_MULTIPLE = 64

_DECODER = "decoder.layers.{}."
_MTP = "mtp.layers.{}.mtp_model_layer."  # the transformer layer of a multi-token prediction layer
_OF_MTP = re.compile(r"^mtp\.layers\.(\d+)\.mtp_model_layer\.")


@dataclass(frozen=True)
class Rule:
    """One line of a family's table.

    ``where``: model (once), layer (every layer), dense or moe (layers of that kind), expert (every
    expert of every MoE layer), mtp (every multi-token prediction layer). ``{L}`` and ``{E}`` stand
    for the layer and the expert; in a Megatron name of ``mtp``, ``{K}`` for the layer's number
    among its kind. ``megatron``: the spellings, any of which may occur. ``hf``: (name, dims), dims
    by ``dims_of``.
    ``tied_to``: the HF tensor that stands in when embeddings are tied; nothing is exported then.
    ``copies``: where files hold the same tensor once more for multi-token prediction layer ``{L}``.
    ``dtype``: of the tensor, whatever the model's is.
    ``stacked``: files hold the layer's experts in one tensor, [experts, *dims]; the parameter is
    entry ``{E}`` of it.
    ``together``: tensors of one layer with the same word here have to reach a server in one call.
    """

    where: Literal["model", "layer", "dense", "moe", "expert", "mtp"]
    megatron: tuple[str, ...]
    hf: tuple[tuple[str, tuple[str, ...]], ...]
    operator: str
    tied_to: str | None = None
    copies: str | None = None
    dtype: str | None = None
    stacked: bool = False
    together: str | None = None


@dataclass(frozen=True)
class _Match:
    rule: Rule
    numbers: dict[str, int]  # {"L": 3, "E": 17}

    def hf(self, dims: dict[str, int]) -> list[tuple[str, tuple[int, ...]]]:
        return [(n.format(**self.numbers), tuple(dims[d] for d in ds)) for n, ds in self.rule.hf]


@dataclass(frozen=True)
class Part:
    """What a parameter, or one tensor-parallel rank's shard of it, takes of one HF tensor: the
    ``span`` of dimension ``axis`` of the tensor, or of its entry ``index``.
    """

    name: str
    index: int | None
    axis: int
    span: tuple[int, int]
    shape: tuple[int, ...]  # of what it takes


class FamilyRules(Protocol):
    def __call__(self, spec: ModelSpec) -> tuple[Rule, ...]: ...


class ModelMapping:
    """The table of one model: a family's rules with this model's dimensions."""

    def __init__(self, spec: ModelSpec, rules: Sequence[Rule], padded_vocab: int) -> None:
        assert padded_vocab >= spec.vocab, (padded_vocab, spec.vocab)
        self.spec = spec
        self.rules = tuple(rules)
        self.padded_vocab = padded_vocab
        self._dims = dims_of(spec)
        self._matches: dict[str, _Match] = {}
        self._parts: dict[tuple[str, int, int], tuple[Part, ...]] = {}  # weight pushes ask again

    def hf_names(self, name: str) -> tuple[str, ...]:
        """The HF tensors of parameter ``name``, in the order ``to_megatron`` takes them; or of
        which it takes entry ``slice_of(name)``.

        Raises DataError for a parameter no rule knows.
        """
        match = self._match(name)
        if match.rule.tied_to and self.spec.tie_embeddings:
            return (match.rule.tied_to,)
        return tuple(hf for hf, _ in match.hf(self._dims))

    def slice_of(self, name: str) -> int | None:
        """Where in its HF tensors parameter ``name`` is; None where it is all of them."""
        match = self._match(name)
        return match.numbers["E"] if match.rule.stacked else None

    def exported(self, name: str) -> list[tuple[str, tuple[int, ...]]]:
        """(HF name, shape) of what ``to_hf(name, ...)`` returns; none for a tied output layer."""
        return self._exported(self._match(name))

    def _exported(self, match: _Match) -> list[tuple[str, tuple[int, ...]]]:
        if match.rule.tied_to and self.spec.tie_embeddings:
            return []
        found = match.hf(self._dims)
        return found + [(copy, found[0][1]) for copy in self._copies(match.rule)]

    def _in_files(self, match: _Match) -> list[tuple[str, tuple[int, ...]]]:
        """Whole tensors, of the first of the parameters that share them."""
        if not match.rule.stacked:
            return self._exported(match)
        whole = [(name, (self.spec.experts, *shape)) for name, shape in self._exported(match)]
        return whole if match.numbers["E"] == 0 else []

    def _copies(self, rule: Rule) -> list[str]:
        return [rule.copies.format(L=layer) for layer in self._mtp_layers if rule.copies]

    def copies(self) -> dict[str, str]:
        """HF tensors that repeat another, and which. A checkpoint may lack them."""
        return {
            copy: rule.hf[0][0]
            for rule in self.rules
            if not (rule.tied_to and self.spec.tie_embeddings)
            for copy in self._copies(rule)
        }

    def together(self) -> list[tuple[str, ...]]:
        """HF tensors that a server takes only in one call, as its loader makes one of them."""
        found: dict[tuple[str, int], list[str]] = {}
        for match in self._everything():
            if match.rule.together:
                key = (match.rule.together, match.numbers.get("L", -1))
                found.setdefault(key, []).extend(hf for hf, _ in match.hf(self._dims))
        return [tuple(names) for names in found.values() if len(names) > 1]

    def rule_of(self, name: str) -> Rule:
        """Raises DataError for a parameter no rule knows."""
        return self._match(name).rule

    def shape(self, name: str, tp_size: int = 1) -> tuple[int, ...]:
        """Of parameter ``name`` in Megatron, rows of padding included; one rank's shard of it.

        Raises DataError where ``tp_size`` does not divide the parameter.
        """
        parts = self.parts(name, 0, tp_size)
        return self._operator(self._match(name)).shape([p.shape for p in parts], tp_size)

    def parts(self, name: str, tp_rank: int = 0, tp_size: int = 1) -> Sequence[Part]:
        """What the shard of ``tp_rank`` takes of the tensors of ``hf_names(name)``.

        Raises DataError where ``tp_size`` does not divide the parameter.
        """
        key = (name, tp_rank, tp_size)
        if key not in self._parts:
            self._parts[key] = tuple(self._find_parts(*key))
        return self._parts[key]

    def _find_parts(self, name: str, tp_rank: int, tp_size: int) -> list[Part]:
        match, index = self._match(name), self.slice_of(name)
        operator = self._operator(match)
        found = []
        for hf, (_, shape) in zip(self.hf_names(name), match.hf(self._dims), strict=True):
            axis = range(len(shape))[operator.axis or 0]
            span = (0, shape[axis])
            if operator.axis is not None:
                try:
                    span = operator.span(shape[axis], tp_rank, tp_size)
                except DataError as e:
                    raise DataError(f"{name}: {e}") from e
            part = (*shape[:axis], span[1] - span[0], *shape[axis + 1 :])
            found.append(Part(hf, index, axis, span, part))
        return found

    def views(self, name: str, shard: Tensor, parts: Sequence[Part]) -> list[Tensor]:
        """Where ``shard`` of parameter ``name`` has what it takes of each of ``parts``: memory of
        its own. In the part's order of elements; reshaped, the part.
        """
        return self._operator(self._match(name)).views(shard, [part.shape for part in parts])

    def is_expert(self, name: str) -> bool:
        return self._match(name).rule.where == "expert"

    def is_sharded(self, name: str) -> bool:
        """False where every tensor-parallel rank holds the whole parameter (norms, the router)."""
        return self._operator(self._match(name)).axis is not None

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
        parts = self.parts(name, tp_rank, tp_size)
        shard = hf_tensors[0].new_zeros(self.shape(name, tp_size))
        for part, view, tensor in zip(
            parts, self.views(name, shard, parts), hf_tensors, strict=True
        ):
            begin, end = part.span
            view.copy_(tensor.narrow(part.axis, begin, end - begin).reshape(view.shape))
        return shard

    def to_hf(self, name: str, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """(HF name, whole tensor) pairs of one parameter, from its shards in tensor-parallel order.
        Entry ``slice_of(name)`` of the HF tensor, where that is not None.

        For a parameter that is not sharded one tensor is enough, the first is taken.
        """
        match = self._match(name)
        exported = self._exported(match)
        if not exported:
            return []
        used = shards if self._operator(match).axis is not None else shards[:1]
        pieces = [self._pieces(name, shard, r, len(used)) for r, shard in enumerate(used)]
        axes = [part.axis for part in self.parts(name)]
        tensors = [
            torch.cat(same, axis) if len(same) > 1 else same[0].contiguous()
            for axis, *same in zip(axes, *pieces, strict=True)
        ]
        tensors += tensors[:1] * (len(exported) - len(tensors))  # copies
        for (hf, shape), tensor in zip(exported, tensors, strict=True):
            assert tuple(tensor.shape) == shape, (name, hf, tuple(tensor.shape), shape, len(shards))
        return [(hf, tensor) for (hf, _), tensor in zip(exported, tensors, strict=True)]

    def _pieces(self, name: str, shard: Tensor, rank: int, size: int) -> list[Tensor]:
        """What a shard has of each HF tensor."""
        parts = self.parts(name, rank, size)
        views = self.views(name, shard, parts)
        return [view.reshape(part.shape) for part, view in zip(parts, views, strict=True)]

    def hf_spec(self, dtype: str | None = None) -> list[TensorSpec]:
        """Every tensor of the model's HF checkpoint, in the order of the layers.

        ``dtype``: of the checkpoint meant; default the one config.json declares. A rule's own
        goes before.
        """
        return [
            TensorSpec(name, shape, match.rule.dtype or dtype or self.spec.dtype)
            for match in self._everything()
            for name, shape in self._in_files(match)
        ]

    def megatron_names(self, *, every_spelling: bool = False) -> list[str]:
        """Every parameter of the whole model, in each rule's first spelling or in all of them."""
        return [
            self._megatron_name(match, spelling)
            for match in self._everything()
            for spelling in match.rule.megatron[: None if every_spelling else 1]
        ]

    def _megatron_name(self, match: _Match, spelling: str) -> str:
        number = match.numbers.get("L", 0) - self.spec.layers
        name = spelling.format(**match.numbers, K=number)
        if number < 0:
            return name
        return name.replace(_DECODER.format(match.numbers["L"]), _MTP.format(number))

    def _everything(self) -> Iterator[_Match]:
        """Rules outside the layers keep their place in the table: before or after the layers."""
        in_layers = [rule for rule in self.rules if rule.where != "model"]
        first = self.rules.index(in_layers[0])
        yield from (_Match(rule, {}) for rule in self.rules[:first] if rule.where == "model")
        for layer, is_moe in enumerate(self.spec.moe_layers):
            kinds = {"layer", "moe", "expert"} if is_moe else {"layer", "dense"}
            yield from self._of_layer(layer, kinds)
        for layer in self._mtp_layers:
            yield from self._of_layer(layer, {"layer", "moe", "expert", "mtp"})
        yield from (_Match(rule, {}) for rule in self.rules[first:] if rule.where == "model")

    def _of_layer(self, layer: int, kinds: set[str]) -> Iterator[_Match]:
        for rule in self.rules:
            if rule.where == "expert" and "expert" in kinds:
                yield from (_Match(rule, {"L": layer, "E": e}) for e in range(self.spec.experts))
            elif rule.where in kinds:
                yield _Match(rule, {"L": layer})

    @property
    def _mtp_layers(self) -> range:
        """Their numbers in files."""
        return range(self.spec.layers, self.spec.layers + self.spec.mtp_layers)

    def _match(self, name: str) -> _Match:
        if name not in self._matches:
            self._matches[name] = self._find(name)
        return self._matches[name]

    def _find(self, name: str) -> _Match:
        plain = _OF_MTP.sub(lambda m: _DECODER.format(self.spec.layers + int(m[1])), name)
        for pattern, rule in self._patterns:
            found = pattern.fullmatch(plain)
            if found:
                numbers = {k: int(v) for k, v in found.groupdict().items()}
                if "K" in numbers:
                    numbers["L"] = self.spec.layers + numbers["K"]
                return _Match(rule, numbers)
        raise DataError(f"no rule of family {self.spec.family} maps the Megatron parameter {name}")

    def _operator(self, match: _Match) -> Operator:
        return OPERATORS[match.rule.operator](self.spec, self.padded_vocab)

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(_pattern(s), rule) for rule in self.rules for s in rule.megatron]


def mapping_for(spec: ModelSpec, padded_vocab: int | None = None) -> ModelMapping:
    """The mapping of a model whose embedding has ``padded_vocab`` rows in Megatron."""
    rules = cast(FamilyRules, importlib.import_module(FAMILIES[spec.family]).rules)
    return ModelMapping(spec, rules(spec), padded_vocab or spec.vocab)


def padded_vocab_size(vocab: int, multiple: int) -> int:
    """``vocab`` rounded up. With the same ``multiple`` for every tp, checkpoints fit every tp."""
    return -(-vocab // multiple) * multiple


def layout_problems(spec: ModelSpec, tp: int, etp: int) -> list[Problem]:
    """What a tensor-parallel layout cannot split, all of it at once."""
    sizes = [
        ("parallel.tp", tp, "num_attention_heads", spec.heads),
        ("parallel.tp", tp, "num_key_value_heads", spec.kv_heads),
        ("parallel.tp", tp, "intermediate_size", 0 if all(spec.moe_layers) else spec.ffn),
        ("parallel.tp", tp, "the width of the shared experts", spec.shared_ffn),
        ("parallel.etp", etp, "moe_intermediate_size", spec.moe_ffn),
    ]
    return [Problem(k, str(n), f"a divisor of {what}={v}") for k, n, what, v in sizes if v % n]


def dims_of(spec: ModelSpec) -> dict[str, int]:
    """The words of the tables' dims."""
    mla = spec.mla or Mla(q_rank=0, kv_rank=0, nope_dim=0, rope_dim=0, value_dim=0)
    return {
        "vocab": spec.vocab,
        "hidden": spec.hidden,
        "q": spec.heads * spec.head_dim,
        "kv": spec.kv_heads * spec.head_dim,
        "heads": spec.heads,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "moe_ffn": spec.moe_ffn,
        "moe_ffn_twice": 2 * spec.moe_ffn,
        "experts": spec.experts,
        "shared_ffn": spec.shared_ffn,
        "hidden_twice": 2 * spec.hidden,
        "q_rank": mla.q_rank,
        "kv_rank": mla.kv_rank,
        "kv_rank_and_rope": mla.kv_rank + mla.rope_dim,
        "keys_and_values": spec.heads * (mla.nope_dim + mla.value_dim),
        "values": spec.heads * mla.value_dim,
    }


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{([LEK])\\\}", r"(?P<\1>\\d+)", re.escape(template)))
