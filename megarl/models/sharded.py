"""Where a parameter lies in Megatron's distributed checkpoints: under which key, at which offsets.

A file knows no layout. Its keys are those of Transformer Engine's layer spec, where norms belong to
the projections behind them; a layer's experts are one tensor with an axis more, in front, and a
parameter that holds gate and up is two chunks, since a tensor-parallel rank has rows of either
(megatron-core 0.19.2: ``sharded_state_dict`` with ``non_homogeneous_layers``).
"""

import math
import re
from dataclasses import dataclass

import torch

from megarl.models.mapping import VOCAB_MULTIPLE, ModelMapping, mapping_for, padded_vocab_size
from megarl.models.spec import ModelSpec

# Names of norms that are modules of their own -> names in files
_ATTENTION_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_LATENT_NORMS = {
    f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
    for x in ("q", "kv")
}
_DENSE_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}

_IN_LAYER = re.compile(r"((decoder|mtp)\.layers\.(\d+)\.)(mtp_model_layer\.)?(.+)")
_MTP_LAYER = {"mtp_model_layer.": "transformer_layer."}
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(.+)|(linear_fc[12]\.(?:weight|bias))(\d+))"
)
_HALVES = {"gate_up": 2, "interleaved": 2}  # operators of parameters that are several chunks


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor of a file: rows ``begin`` to ``end`` of a parameter."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Place:
    """Of one parameter: ``chunks`` of the tensor ``key``, whose whole shape is ``shape``."""

    key: str
    shape: tuple[int, ...]
    parameter: tuple[int, ...]  # its own shape
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Of the parameter."""
        return math.prod(self.parameter) * int(getattr(torch, self.dtype).itemsize)


def megatron_mapping(spec: ModelSpec) -> ModelMapping:
    """The mapping of a model whose embedding has the rows that it has in training."""
    return mapping_for(spec, padded_vocab_size(spec.vocab, VOCAB_MULTIPLE))


def norm_keys(spec: ModelSpec, *, moe: bool) -> dict[str, str]:
    """Of a layer: beginnings of names whose keys begin otherwise, and how."""
    keys = _LATENT_NORMS if spec.mla else _ATTENTION_NORM
    return keys if moe else {**keys, **_DENSE_NORM}


def parameter_names(mapping: ModelMapping) -> list[str]:
    """Every parameter that a checkpoint holds. A tied output layer is the embedding."""
    return [name for name in mapping.megatron_names() if mapping.exported(name)]


def place_of(mapping: ModelMapping, name: str) -> Place:
    """Of parameter ``name``, in any spelling. Raises DataError for one that no rule knows."""
    rule, shape = mapping.rule_of(name), mapping.shape(name)
    key, expert = _key(mapping.spec, name)
    first = () if expert is None else (expert,)
    count = _HALVES.get(rule.operator, 1)
    rows = shape[0] // count
    chunks = tuple(
        Chunk(
            offsets=(*first, i * rows, *(0 for _ in shape[1:])),
            sizes=(*(1 for _ in first), rows, *shape[1:]),
            begin=i * rows,
            end=(i + 1) * rows,
        )
        for i in range(count)
    )
    whole = shape if expert is None else (mapping.spec.experts, *shape)
    return Place(key, whole, shape, rule.dtype or mapping.spec.dtype, chunks)


def _key(spec: ModelSpec, name: str) -> tuple[str, int | None]:
    """The key, and the expert."""
    in_layer = _IN_LAYER.fullmatch(name)
    if in_layer is None:
        return name, None
    layer, kind, number, of_mtp, rest = in_layer.groups()
    moe = spec.experts > 0 if kind == "mtp" else spec.moe_layers[int(number)]
    for begin, there in norm_keys(spec, moe=moe).items():
        if rest.startswith(begin):
            rest = there + rest.removeprefix(begin)
    layer += _MTP_LAYER.get(of_mtp or "", "")
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return layer + rest, None
    local, local_rest, grouped_rest, grouped = expert.groups()
    return f"{layer}mlp.experts.experts.{local_rest or grouped_rest}", int(local or grouped)
