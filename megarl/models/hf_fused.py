"""Experts that files hold fused, as transformers 5 has them in memory and writes them with
``save_original_format=False``: a layer's in two tensors, instead of three for each expert.

::

    {layer}.mlp.experts.gate_up_proj [E, 2I, H]   gate over up, expert by expert
    {layer}.mlp.experts.down_proj    [E, H, I]

Every expert's matrix is bytes in a row of the fused one: it gets a place of its own, under the name
it has in the other spelling, and nothing else needs to know. In FP8 blocks, so do its scales; where
a block holds rows of gate and of up, they cannot be told apart by bytes, and the folder is refused.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from megarl.models.hf_fp8 import SCALE, Fp8Blocks
from megarl.models.hf_headers import Place

_FUSED = re.compile(rf"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)({SCALE})?")
_APART = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_WHOLE = {part: whole for whole, parts in _PARTS.items() for part in parts}
_STACKED_BY_NATURE = ("gpt_oss",)  # model types that have no other spelling


def fused_name(name: str) -> str | None:
    """In the fused spelling, of the tensor that holds expert's matrix ``name``; None for others."""
    apart = _APART.fullmatch(name)
    return f"{apart[1]}.{_WHOLE[apart[2]]}" if apart else None


def fused_faults(
    places: Mapping[str, Place], config: Mapping[str, Any], blocks: Fp8Blocks | None
) -> Iterator[str]:
    """Tensors in FP8 of which a block holds rows of gate and of up."""
    if blocks is None or config.get("model_type") in _STACKED_BY_NATURE:
        return
    for name, place in places.items():
        fused = _FUSED.fullmatch(name)
        parts = _PARTS[fused[2]] if fused else ()
        in_codes = place.dtype == torch.float8_e4m3fn and len(place.shape) == 3
        if in_codes and len(parts) > 1 and place.shape[1] % (len(parts) * blocks.block[0]):
            shared = f"blocks of {blocks.block[0]} rows hold rows of gate and of up"
            wants = "accepted: gate and up of whole blocks, or a matrix for each expert"
            yield f"{name} {list(place.shape)}: {shared}; {wants}"


def split_fused(places: Mapping[str, Place], config: Mapping[str, Any]) -> dict[str, Place]:
    """``places`` with an entry for every expert's matrix instead of those for fused ones."""
    if config.get("model_type") in _STACKED_BY_NATURE:
        return dict(places)
    return {n: p for name, place in places.items() for n, p in _split(name, place)}


def _split(name: str, place: Place) -> Iterator[tuple[str, Place]]:
    fused = _FUSED.fullmatch(name)
    parts = _PARTS[fused[2]] if fused else ()
    if fused is None or len(place.shape) != 3 or place.shape[1] % len(parts):
        yield name, place
        return
    experts, rows, columns = place.shape
    shape = (rows // len(parts), columns)
    size = shape[0] * shape[1] * place.dtype.itemsize
    for expert in range(experts):
        for k, part in enumerate(parts):
            begin = place.begin + (expert * len(parts) + k) * size
            own = replace(place, shape=shape, begin=begin, end=begin + size)
            yield f"{fused[1]}.{expert}.{part}.weight{fused[3] or ''}", own
