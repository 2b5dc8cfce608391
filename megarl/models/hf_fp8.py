"""Weights in FP8 blocks, as DeepSeek-V3 publishes them: what of a folder is in codes, and how.

``X`` float8_e4m3fn [N, K] lies beside ``X_scale_inv`` float32 or bfloat16
[ceil(N / block_n), ceil(K / block_k)]; experts that files stack, [experts, N, K], have their scales
stacked. The value is ``code * scale`` (``ops/fp8_block.py``). config.json says so::

    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                            "activation_scheme": "dynamic"}

Any block size is read. Per-tensor scales, e5m2, integers, MXFP4 and other packings are refused, and
so is a folder whose tensors and config.json do not say the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.config.served import STORED_SCALES
from megarl.errors import Problem
from megarl.models.hf_headers import Place

KEY = "quantization_config"
SCALE = "_scale_inv"
_LISTS = ("modules_to_not_convert", "ignored_layers")  # two spellings of one thing
_ONLY: dict[str, tuple[object, ...]] = {  # key -> values accepted; None always is
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),  # static: scales of activations are stored, too
    "scale_fmt": tuple(STORED_SCALES),  # how scales were rounded; they are multiplied with alike
    "dequantize": (False, True),  # a choice of who loads the folder
}
_METHOD = (
    "fp8 (e4m3 codes with a scale a block); scales of whole tensors, e5m2, int8, gptq, awq, mxfp4 "
    "and compressed-tensors are not read"
)
_BLOCK = "[rows, columns] of a block, as [128, 128]; scales of whole tensors are not read"


@dataclass(frozen=True)
class Fp8Blocks:
    """``excluded``: modules that config.json says are not in FP8. ``scales``: how it says they were
    rounded; None where it does not.
    """

    block: tuple[int, int]
    excluded: tuple[str, ...]
    scales: str | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Fp8Blocks | None":
        """Of a config.json without ``quantization_problems``; None if weights are plain."""
        value = config.get(KEY)
        if value is None:
            return None
        rows, columns = value["weight_block_size"]
        excluded = tuple(m for key in _LISTS for m in value.get(key) or ())
        return Fp8Blocks((rows, columns), excluded, STORED_SCALES.get(value.get("scale_fmt")))

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        *stack, rows, columns = shape
        return (*stack, -(-rows // self.block[0]), -(-columns // self.block[1]))

    def excludes(self, name: str) -> str | None:
        """The entry of ``excluded`` that is a tensor's module or above it, written in full or by
        its last parts.
        """
        dotted = f".{name}"
        return next((m for m in self.excluded if f".{m}." in dotted), None)


def quantization_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """What of a config.json's ``quantization_config`` is not read."""
    value = config.get(KEY)
    if value is None:
        return
    if not isinstance(value, dict):
        yield Problem(KEY, repr(value), "an object or null")
        return
    if value.get("quant_method") != "fp8":
        yield Problem(f"{KEY}.quant_method", repr(value.get("quant_method")), _METHOD)
        return
    for key, accepted in _ONLY.items():
        if value.get(key) is not None and value[key] not in accepted:
            yield Problem(f"{KEY}.{key}", repr(value[key]), " or ".join(map(repr, accepted)))
    block = value.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
        yield Problem(f"{KEY}.weight_block_size", repr(block), _BLOCK)
    for key in _LISTS:
        names = value.get(key) or []
        if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
            yield Problem(f"{KEY}.{key}", repr(names), "a list of modules' names, or null")
    known = {"quant_method", "weight_block_size", *_LISTS, *_ONLY}
    for key in sorted(key for key in set(value) - known if value[key] is not None):
        yield Problem(f"{KEY}.{key}", repr(value[key]), f"one of {', '.join(sorted(known))}")


def scale_faults(
    places: Mapping[str, Place], unread: set[str], blocks: Fp8Blocks | None
) -> Iterator[str]:
    """Where codes, scales and config.json do not fit each other. ``unread``: tensors that are not
    missing, but lie in files that cannot be read.
    """
    codes = {name for name, place in places.items() if place.dtype == torch.float8_e4m3fn}
    scales = {name for name in places if name.endswith(SCALE)}
    if blocks is None:
        if codes:
            yield f"{len(codes)} tensors are F8_E4M3, but config.json has no {KEY}: {_some(codes)}"
        elif scales:
            yield f"scales of FP8, but config.json has no {KEY}: {_some(scales)}"
        return
    if not codes and not unread:
        yield f"config.json has a {KEY}, but no tensor is F8_E4M3"
    for name in sorted(codes):
        yield from _code_faults(name, places, unread, blocks)
    for name in sorted(scales):
        of = name.removesuffix(SCALE)
        if of not in codes and of not in unread:
            found = f"is {_name_of(places[of].dtype)}" if of in places else "is not there"
            yield f"{name} has no codes: {of} {found}"
    for name in sorted(n for n in places if n.endswith(("weight_scale", "input_scale"))):
        yield f"{name}: a scale of a whole tensor is not read; accepted: X{SCALE}, a scale a block"


def _code_faults(
    name: str, places: Mapping[str, Place], unread: set[str], blocks: Fp8Blocks
) -> Iterator[str]:
    shape, scale = places[name].shape, places.get(name + SCALE)
    if len(shape) not in (2, 3):
        yield f"{name}: found {list(shape)} in F8_E4M3; accepted: matrices, stacked or not"
        return
    implied = blocks.scales_shape(shape)
    if scale is None:
        if name + SCALE not in unread:
            yield f"missing {name}{SCALE} {list(implied)}, of F8_E4M3 {name}"
        return
    if scale.shape != implied:
        of = f"{name} {list(shape)} in blocks of {list(blocks.block)}"
        yield f"{name}{SCALE}: found {list(scale.shape)}; {of} implies {list(implied)}"
    if scale.dtype == torch.float8_e4m3fn:
        yield f"{name}{SCALE}: found F8_E4M3; accepted: F32 or BF16"
    if (module := blocks.excludes(name)) is not None:
        yield f"{name} is F8_E4M3, but config.json's {KEY} says that {module} is not"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names))
