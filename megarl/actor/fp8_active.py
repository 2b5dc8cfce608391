"""Which matrix products of a built model are in FP8, and whether that is what was asked for.

Megatron takes FP8 from Transformer Engine and says nothing where it cannot: its FP8 context is
empty without the package, its own linear layers ignore it, and settings are accepted either way. So
the built model is asked, module by module:

1. Every module that holds a matrix is a product of some kind ("self_attention.linear_qkv"), in a
   layer or outside all of them. Its precision is what it would compute in if it were called now: of
   Transformer Engine's modules what their context holds, of emulating ones what they carry.
2. All products of layers are in FP8 but those of ``BF16``, and those of the first and last layers
   that ``precision.fp8`` leaves out. Anything else, either way, is an error.
3. The recipe in force is the one that was asked for, number by number, and matrices are stored in
   FP8 if and only if ``param_gather`` is on.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import get_fp8_context, is_float8tensor

from megarl.actor.names import unwrap
from megarl.config.fp8 import Fp8Section, row_alignment
from megarl.errors import ConfigError, Problem
from megarl.hostcomm import agree, gather_json
from megarl.installed import import_fault

KEY = "precision.fp8"
PLAIN = "bf16"

# Kinds of products that are not in FP8, by design (docs/fp8.md). What is no product of two matrices
# (norms, biases, sinks) and attention itself, which holds no weights, is not either.
BF16 = (
    "embedding.word_embeddings",
    "output_layer",  # a critic has its value head there
    "mlp.router",
    "mlp.shared_experts.gate_weight",
)

Report = dict[str, dict[str, list[int]]]  # kind -> precision -> layers, [] outside of all

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"local_experts\.\d+\.")
_COMPARED = {  # what a recipe is made of, as settings
    "tensorwise": ("recipe", "format"),
    "delayed": ("recipe", "format", "amax_history", "amax_algo", "margin"),
    "blockwise": ("recipe", "format", "scales"),
    "mxfp8": ("recipe", "format"),
}


# --- what is computed -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A module that multiplies with matrices of its own. ``layer``: of the whole model, None
    outside of layers.
    """

    kind: str
    layer: int | None
    module: Any
    matrices: tuple[torch.nn.Parameter, ...]


@dataclass(frozen=True)
class Found:
    """``settings``: of the recipe in force, None where there is none, with ``why``."""

    settings: Mapping[str, Any] | None
    why: str = ""

    @property
    def text(self) -> str:
        return PLAIN if self.settings is None else _words(self.settings)


def products(chunk: torch.nn.Module) -> Iterator[Product]:
    """Of a chunk of the model. Multi-token prediction is left out: it is not computed (mtp.py)."""
    model = unwrap(chunk)
    for name, module in model.named_modules():
        if name.startswith("mtp."):
            continue
        by_kind: dict[str, list[torch.nn.Parameter]] = {}
        for weight, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2:
                own = "" if weight.startswith("weight") else f".{weight}"
                by_kind.setdefault(f"{name}{own}", []).append(parameter)
        for path, matrices in by_kind.items():
            inside = _LAYER.match(path)
            layer = None
            if inside is not None:
                layer = model.decoder.layers[int(inside[1])].layer_number - 1
            kind = _EXPERT.sub("", _LAYER.sub("", path))
            yield Product(kind, layer, module, tuple(matrices))


def examine(model: Sequence[torch.nn.Module], section: Fp8Section) -> list[tuple[Product, Found]]:
    """Every product of this rank's chunks with what it computes in."""
    find = _FINDERS[section.backend]
    return [pair for chunk in model for pair in find(chunk)]


def _of_engine(chunk: torch.nn.Module) -> Iterator[tuple[Product, Found]]:
    config = unwrap(chunk).config
    in_force: dict[int | None, Found] = {}
    for product in products(chunk):
        if product.layer not in in_force:
            in_force[product.layer] = _in_force(config, product.layer)
        yield product, _of_module(product.module, in_force[product.layer])


def _of_emulation(chunk: torch.nn.Module) -> Iterator[tuple[Product, Found]]:
    for product in products(chunk):
        recipe = getattr(product.module, "fp8", None)
        if recipe is None:
            yield product, Found(None, f"{type(product.module).__name__} does not emulate it")
        else:
            yield product, Found(recipe.settings)


_FINDERS: Mapping[str, Callable[[torch.nn.Module], Iterator[tuple[Product, Found]]]] = {
    "te": _of_engine,
    "emulated": _of_emulation,
}


def _in_force(config: Any, layer: int | None) -> Found:
    """What Megatron's FP8 context of a layer holds, by entering it as a forward pass does."""
    if layer is None:
        return Found(None, "it lies outside of the layers")
    delayed = config.fp8_recipe == "delayed"  # one context for all layers
    with torch.no_grad():
        context = get_fp8_context(config, -1 if delayed else layer)
        if isinstance(context, nullcontext):
            return Found(None, "Megatron has no FP8 context for it" + _cause())
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager as State

        try:
            with context:
                if not State.is_fp8_enabled():
                    return Found(None, "Transformer Engine's FP8 context is switched off")
                return Found(_settings(State.get_fp8_recipe()))
        except RuntimeError as e:  # what this GPU cannot do
            return Found(None, f"Transformer Engine: {e}")


def _cause() -> str:
    fault = import_fault()
    return "" if fault is None else f": Transformer Engine cannot be used here ({fault})"


def _of_module(module: Any, context: Found) -> Found:
    """What a module does in a context."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    kind = type(module).__name__
    if not HAVE_TE:
        return Found(None, f"{kind} is no module of Transformer Engine" + _cause())
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    if not isinstance(module, TransformerEngineBaseModule):
        return Found(None, f"{kind} is no module of Transformer Engine")
    if getattr(module, "te_quant_params", None) is not None:
        return Found(None, f"{kind} has a recipe of its own, which no setting here gives it")
    return context


def _settings(recipe: Any) -> dict[str, Any]:
    """Of a recipe object of Transformer Engine, in the words of ``Fp8Section``."""
    kinds = {
        "delayed": recipe.delayed(),
        "tensorwise": recipe.float8_current_scaling(),
        "blockwise": recipe.float8_block_scaling(),
        "mxfp8": recipe.mxfp8(),
    }
    name = next((name for name, is_it in kinds.items() if is_it), type(recipe).__name__)
    found = {"recipe": name, "format": recipe.fp8_format.name.lower()}
    if name == "delayed":
        found |= {
            "amax_history": recipe.amax_history_len,
            "amax_algo": recipe.amax_compute_algo,
            "margin": recipe.margin,
        }
    if name == "blockwise":
        operands = (
            recipe.fp8_quant_fwd_inp,
            recipe.fp8_quant_fwd_weight,
            recipe.fp8_quant_bwd_grad,
        )
        powers = {operand.power_2_scale for operand in operands}
        found["scales"] = {(True,): "power_of_two", (False,): "f32"}.get(tuple(powers), "mixed")
    if recipe.backward_override is not None:
        found["backward"] = recipe.backward_override
    return found


def _words(settings: Mapping[str, Any]) -> str:
    text = f"fp8 {settings['recipe']} {settings['format']}"
    rest = {k: v for k, v in settings.items() if k not in ("recipe", "format")}
    return ", ".join([text, *(f"{name} {value}" for name, value in rest.items())])


# --- is it what was asked for? --------------------------------------------------------------------


def fp8_problems(
    found: Sequence[tuple[Product, Found]], section: Fp8Section, layers: int
) -> list[Problem]:
    """What differs from ``section`` in a model of ``layers`` layers, each thing once."""
    wanted = {name: getattr(section, name) for name in _COMPARED[section.recipe]}
    faults: dict[tuple[str, str], list[int]] = {}
    for product, actual in found:
        plain = _stays_plain(product, section, layers)
        settings, faulty = actual.settings, False
        if settings is None or plain:
            faulty = plain != (settings is None)
        else:  # an emulation does not say everything
            faulty = not settings.items() <= wanted.items()
        if faulty:
            why = f" ({actual.why})" if settings is None else ""
            accepted = PLAIN if plain else _words(wanted)
            text = f"{product.kind} in {actual.text}{why}"
            layer = -1 if product.layer is None else product.layer
            faults.setdefault((text, accepted), []).append(layer)
    problems = [
        Problem(KEY, f"{text}{_in_layers(where)}", accepted)
        for (text, accepted), where in faults.items()
    ]
    if not problems and section.backend == "te":
        problems = list(_stored_wrongly(found, section))
    return problems


def _stays_plain(product: Product, section: Fp8Section, layers: int) -> bool:
    if product.layer is None or product.kind in BF16:
        return True
    end = layers - section.last_layers_bf16
    return product.layer < section.first_layers_bf16 or product.layer >= end


def _stored_wrongly(
    found: Sequence[tuple[Product, Found]], section: Fp8Section
) -> Iterator[Problem]:
    """Matrices of FP8 products that are not stored as asked for, or whose sides Transformer Engine
    cannot multiply.
    """
    unit = row_alignment(section)
    seen: set[str] = set()
    for product, actual in found:
        for matrix in product.matrices if actual.settings is not None else ():
            stored = is_float8tensor(matrix)
            faults = []
            if stored != section.param_gather:
                text = f"{product.kind} is stored in {'FP8' if stored else PLAIN}"
                faults.append(Problem(f"{KEY}.param_gather", text, str(stored).lower()))
            if any(side % unit for side in matrix.shape):
                sides = " x ".join(map(str, matrix.shape))
                accepted = f"multiples of {unit} on both sides, for {section.recipe}"
                faults.append(Problem(KEY, f"{product.kind} of {sides} on a rank", accepted))
            yield from (fault for fault in faults if str(fault) not in seen)
            seen |= {str(fault) for fault in faults}


def _in_layers(where: Sequence[int]) -> str:
    inside = sorted({layer for layer in where if layer >= 0})
    return f", layers {', '.join(map(str, inside))}" if inside else ""


# --- said once, and required ----------------------------------------------------------------------


def require_fp8(
    models: Mapping[str, Sequence[torch.nn.Module]],
    section: Fp8Section | None,
    group: dist.ProcessGroup,
) -> dict[str, Report] | None:
    """Model -> kind -> precision -> layers, of all ranks together, on rank 0; None elsewhere and
    without FP8. Collective.

    Raises ConfigError, on every rank, with all that is not as ``section`` says.
    """
    if section is None:
        return None
    error: ConfigError | None = None
    reports: dict[str, Report] = {}
    problems: list[Problem] = []
    for name, model in models.items():
        found = examine(model, section)
        reports[name] = _report(found)
        layers = unwrap(model[0]).config.num_layers
        problems += [p for p in fp8_problems(found, section, layers) if p not in problems]
    if problems:
        error = ConfigError(problems)
    agree(error, group, "looking for FP8 in the built model")
    gathered = gather_json(reports, group)
    return None if gathered is None else _merged(gathered)


def _report(found: Sequence[tuple[Product, Found]]) -> Report:
    report: Report = {}
    for product, actual in found:
        layers = report.setdefault(product.kind, {}).setdefault(actual.text, [])
        if product.layer is not None and product.layer not in layers:
            layers.append(product.layer)
    return report


def _merged(gathered: Sequence[Mapping[str, Report]]) -> dict[str, Report]:
    merged: dict[str, Report] = {}
    for reports in gathered:
        for name, report in reports.items():
            for kind, precisions in report.items():
                for text, layers in precisions.items():
                    known = merged.setdefault(name, {}).setdefault(kind, {}).setdefault(text, [])
                    known[:] = sorted({*known, *layers})
    return merged


def describe(report: Report) -> str:
    """One line: which kinds are in what, with layers where a kind is in several."""
    parts: dict[str, list[str]] = {}
    for kind, precisions in report.items():
        for text, layers in precisions.items():
            only = f" (layers {', '.join(map(str, layers))})" if len(precisions) > 1 else ""
            parts.setdefault(text, []).append(kind + only)
    return "; ".join(f"{text}: {', '.join(kinds)}" for text, kinds in parts.items())
