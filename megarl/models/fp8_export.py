"""A model's weights in FP8 blocks, as DeepSeek-V3 publishes them and SGLang 0.5.23 loads them.

Every tensor goes through alone, under the names of files: a linear's weight becomes codes of the
same name and ``NAME_scale_inv``, all else stays as it is (``hf_fp8.py`` has the format,
``ops/fp8_block.py`` the arithmetic). Exported folders and weights that are sent to FP8 servers come
from here, so that both are the same bits.

1. In codes are the linears of attention and feed-forward parts, experts included. Embeddings, the
   output layer, routers, ``eh_proj``, norms, biases and sinks are not.
2. A server quantises a linear's input 128 columns at a time: a weight is in codes only if its
   columns are whole blocks. Rows may end within one.
3. Some linears are one module of a server, their weights one below the other (``_LINEARS``), and so
   are a layer's experts. Such a module is in codes whole or not at all, and only if no block would
   hold rows of two linears.
4. Modules that hold a matrix and are not in codes are listed in ``modules_to_not_convert``, by
   their names in files; linears of the first multi-token prediction layer also by the name they
   have in SGLang's draft model, which has that layer alone.

Sources: SGLang 0.5.23, ``Fp8LinearMethod.validate_block_quant_shapes``,
``Fp8MoEMethod.create_weights``, ``is_layer_skipped``; config.json of DeepSeek-V3 and V3.1
(``scale_fmt``).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megarl.errors import DataError
from megarl.models.hf_fp8 import SCALE, Fp8Blocks
from megarl.models.hf_write import Entry
from megarl.models.mapping import ModelMapping
from megarl.ops.fp8_block import E4M3_MAX, fp8_block_dequant, fp8_block_quant
from megarl.types import TensorSpec

BLOCK = (128, 128)
SCALES = {"f32": False, "power_of_two": True}  # whether a scale is rounded up to a power of two
_SCALE_FMT: dict[str, dict[str, str]] = {"f32": {}, "power_of_two": {"scale_fmt": "ue8m0"}}


# Last parts of linears' names; together those that are one module of a server, top to bottom
_LINEARS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    *((part,) for part in ("q_b_proj", "kv_b_proj", "o_proj", "down_proj")),
)
_MERGED = {part: linears for linears in _LINEARS for part in linears}
_NOT_QUANTISED = ("lm_head", "head", "gate", "eh_proj")
_NO_LINEARS = ("embed_tokens",)
_EXPERTS = re.compile(r"(.+\.experts)\.\d+\..+")


@dataclass(frozen=True)
class Fp8Export:
    """What of a model is in codes. ``specs``: of what ``parts`` gives, a weight's scales behind
    it. ``codes``: names of weights. ``plain``: modules with a matrix that is not in codes.
    """

    scales: str
    specs: tuple[TensorSpec, ...]
    codes: frozenset[str]
    plain: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(BLOCK),
            **_SCALE_FMT[self.scales],
            **({"modules_to_not_convert": list(self.plain)} if self.plain else {}),
        }

    def parts(self, name: str, tensor: Tensor | Entry) -> list[tuple[str, Tensor | Entry]]:
        """Codes and scales of a weight, which a server must get together; or the tensor.

        Raises DataError, with the name, for a weight that has no codes: NaN, infinities, or so
        large that its codes' values would not be finite.
        """
        if name not in self.codes:
            return [(name, tensor)]
        assert isinstance(tensor, Tensor), name  # ``fp8_export`` refuses stacked experts
        try:
            codes, scales = fp8_weight(tensor, self.scales)
        except RuntimeError as e:
            why = str(e).rpartition("fp8_block_quant: ")[2]
            raise DataError(f"{name} has no FP8 codes: {why}") from e
        if not (scales * E4M3_MAX).bfloat16().isfinite().all():
            raise DataError(f"{name} has no FP8 codes: its largest entries overflow once scaled")
        return [(name, codes), (name + SCALE, scales)]

    def round(self, mapping: ModelMapping, name: str, parameter: Tensor) -> None:
        """Make of the whole parameter ``name`` what its weights' codes stand for."""
        parts = mapping.parts(name)
        for part, view in zip(parts, mapping.views(name, parameter, parts), strict=True):
            if part.name in self.codes:
                codes, scales = fp8_weight(view.reshape(part.shape), self.scales)
                values = fp8_block_dequant(codes, scales, block=BLOCK, dtype=parameter.dtype)
                view.copy_(values.view(view.shape))


def fp8_weight(weight: Tensor, scales: str) -> tuple[Tensor, Tensor]:
    """weight f32|bf16 [N, K] -> codes e4m3 [N, K], scales f32 [ceil(N / 128), ceil(K / 128)]. The
    scale of a block of zeros is 1.

    RuntimeError where a value is not finite.
    """
    return fp8_block_quant(weight, block=BLOCK, eps=0.0, power_of_two=SCALES[scales])


def fp8_export(mapping: ModelMapping, scales: str, exclude: Sequence[str] = ()) -> Fp8Export:
    """How a model's tensors, those of ``mapping.hf_spec()``, are written in FP8 blocks.

    ``exclude``: modules that stay as they are, or what is above them, by their names in files,
    written in full or by the last parts (``model.layers.0``, ``self_attn.kv_b_proj``). Raises
    DataError with everything that is wrong with it, and for models that cannot be in FP8 blocks.
    """
    family = mapping.spec.family
    if any(rule.stacked for rule in mapping.rules):
        why = "files hold its experts stacked and transposed, which no server reads in FP8 blocks"
        raise DataError(f"a model of family {family} is not written in FP8: {why}")
    matrices = [spec for spec in mapping.hf_spec() if len(spec.shape) > 1]
    modules = _modules(matrices)
    fitting = [linears for linears in modules.values() if _fit(linears)]
    if not fitting:
        least = min((s.shape for linears in modules.values() for s in linears), default=())
        why = f"no linear has whole blocks of {BLOCK[0]} x {BLOCK[1]}, as {list(least)}"
        raise DataError(f"the model cannot be written in FP8 blocks: {why}")
    kept = _excluded(fitting, exclude)
    codes = frozenset(s.name for linears in fitting for s in linears) - kept
    if not codes:
        raise DataError("nothing is left to be written in FP8: every linear is excluded")
    return _export(mapping, scales, codes)


def stored_export(mapping: ModelMapping, blocks: Fp8Blocks, scales: str) -> Fp8Export:
    """How a model's tensors are written in the form of a folder that is in FP8 already, with
    ``blocks`` of its config.json.

    Raises DataError with every module that config.json leaves in FP8 and no server takes so, and
    for other blocks than this module writes.
    """
    if blocks.block != BLOCK:
        found = f"weight_block_size {list(blocks.block)}"
        raise DataError(f"{found}: weights are sent in blocks of {list(BLOCK)}")
    matrices = [spec for spec in mapping.hf_spec() if len(spec.shape) > 1]
    codes: set[str] = set()
    faults = []
    for linears in _modules(matrices).values():
        left = [spec for spec in linears if blocks.excludes(spec.name) is None]
        if left and len(left) < len(linears):
            plain = next(spec for spec in linears if spec not in left)
            one = f"{_module(plain.name)} and {_module(left[0].name)} are one module of a server"
            faults.append(f"{one}, and only the first is said to be plain")
        elif left and not _fit(linears):
            shapes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in linears[:3])
            faults.append(f"no whole blocks, and not said to be plain: {shapes}")
        codes.update(spec.name for spec in left)
    if faults:
        raise DataError("\n  ".join(["a server cannot hold the model in FP8 so:", *faults]))
    return _export(mapping, scales, frozenset(codes))


def _export(mapping: ModelMapping, scales: str, codes: frozenset[str]) -> Fp8Export:
    blocks, specs = Fp8Blocks(BLOCK, ()), []
    plain_specs = mapping.hf_spec()
    for spec in plain_specs:
        if spec.name in codes:
            specs.append(TensorSpec(spec.name, spec.shape, "float8_e4m3fn"))
            scales_shape = blocks.scales_shape(spec.shape)
            specs.append(TensorSpec(spec.name + SCALE, scales_shape, "float32"))
        else:
            specs.append(spec)
    matrices = [spec for spec in plain_specs if len(spec.shape) > 1]
    plain = _plain_modules(matrices, codes, mapping.spec.layers)
    return Fp8Export(scales, tuple(specs), codes, plain)


def _modules(matrices: Sequence[TensorSpec]) -> dict[tuple[str, ...], list[TensorSpec]]:
    """The linears of every module that a server has for them."""
    modules: dict[tuple[str, ...], list[TensorSpec]] = {}
    for spec in matrices:
        parent, _, part = _module(spec.name).rpartition(".")
        if part in _MERGED:
            experts = _EXPERTS.fullmatch(spec.name)
            key = (experts[1],) if experts else (parent, *_MERGED[part])
            modules.setdefault(key, []).append(spec)
        elif part not in (*_NOT_QUANTISED, *_NO_LINEARS):
            raise DataError(f"no rule says whether {spec.name} {list(spec.shape)} is in FP8")
    return modules


def _fit(linears: Sequence[TensorSpec]) -> bool:
    """Whether a server takes its linears in blocks."""
    rows: dict[tuple[str, ...], list[int]] = {}  # of those that lie one below the other
    for spec in sorted(linears, key=lambda spec: _MERGED[_part(spec)].index(_part(spec))):
        parent, _, part = _module(spec.name).rpartition(".")
        rows.setdefault((parent, *_MERGED[part]), []).append(spec.shape[0])
    starts = [size for sizes in rows.values() for size in sizes[:-1]]
    return all(size % BLOCK[0] == 0 for size in starts) and all(
        spec.shape[1] % BLOCK[1] == 0 for spec in linears
    )


def _excluded(modules: Iterable[Sequence[TensorSpec]], exclude: Sequence[str]) -> frozenset[str]:
    """The weights that ``exclude`` names."""
    excluded: set[str] = set()
    unused = dict.fromkeys(exclude)
    faults = []
    for linears in modules:
        named = {s.name: [m for m in exclude if f".{m}." in f".{s.name}"] for s in linears}
        hit = [name for name, by in named.items() if by]
        for entry in {m for by in named.values() for m in by}:
            unused.pop(entry, None)
        if hit and len(hit) < len(named):
            left = next(name for name, by in named.items() if not by)
            one = f"{_module(hit[0])} and {_module(left)} are one module of a server"
            faults.append(f"{named[hit[0]][0]}: {one}; exclude both or neither")
        excluded.update(hit)
    faults += [f"{entry}: names no module that would be in FP8" for entry in unused]
    if faults:
        raise DataError("\n  ".join(["modules cannot be excluded from FP8:", *faults]))
    return frozenset(excluded)


def _plain_modules(
    matrices: Sequence[TensorSpec], codes: frozenset[str], layers: int
) -> tuple[str, ...]:
    """Experts of a layer are named together."""
    found: dict[str, None] = {}
    draft = f"model.layers.{layers}."
    for spec in matrices:
        if spec.name in codes or _part(spec) in _NO_LINEARS:
            continue
        experts = _EXPERTS.fullmatch(spec.name)
        name = experts[1] if experts else _module(spec.name)
        found[name] = None
        if name.startswith(draft) and _part(spec) in _MERGED:
            found[f"model.decoder.{name.removeprefix(draft)}"] = None
    return tuple(found)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _part(spec: TensorSpec) -> str:
    return _module(spec.name).rpartition(".")[2]
