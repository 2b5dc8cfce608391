"""What workers do in ``test_fp8_active.py``: models built, and asked which products are in FP8."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_align_size, get_fp8_context

from megarl.actor.fp8 import fp8_options
from megarl.actor.fp8_active import describe, examine, fp8_problems, products, require_fp8
from megarl.actor.fp8_emulated import Fp8Recipe
from megarl.actor.model import build_model
from megarl.actor.options import plain_options
from megarl.actor.setup import init_parallel
from megarl.config.fp8 import Fp8Section, row_alignment
from megarl.errors import MegarlError
from megarl.models.spec import read_spec
from tests.actor.compare import mesh_of

Mark = tuple[str, int | None, dict[str, Any]]  # kind (* for all of layers), layer (None: all), as


def kinds(rank: int, folders: Sequence[Path]) -> list[list[str]]:
    """Of every model, and of the last with a gate in front of its shared experts."""
    parallel = init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        specs = [read_spec(folder) for folder in folders]
        specs.append(replace(specs[-1], shared_ffn=16, shared_gate=True))
        found = []
        for spec in specs:
            (chunk,) = build_model(spec, parallel, torch.bfloat16)
            found.append(sorted({product.kind for product in products(chunk)}))
        return found
    finally:
        parallel_state.destroy_model_parallel()


def without_engine(rank: int, folder: Path, recipe: str) -> dict[str, Any]:
    """Where Transformer Engine is absent: what upstream makes of FP8, and what is said of it."""
    section = Fp8Section(recipe=recipe)  # type: ignore[arg-type]
    parallel = init_parallel(mesh_of({}), seed=1, timeout_s=60)
    try:
        options = {**plain_options(), **fp8_options(section)}
        model = build_model(read_spec(folder), parallel, torch.bfloat16, options)
        config = model[0].config
        silent = isinstance(get_fp8_context(config, 0), nullcontext)
        try:
            require_fp8({"megatron": model}, section, parallel.host)
            said = ""
        except MegarlError as e:
            said = f"{type(e).__name__}: {e}"
        return {"fp8": config.fp8, "recipe": config.fp8_recipe, "silent": silent, "said": said}
    finally:
        parallel_state.destroy_model_parallel()


def marked(
    rank: int, folder: Path, layout: dict[str, int], settings: dict[str, Any], marks: list[Mark]
) -> dict[str, Any]:
    """A model whose modules are marked as computing in FP8, as an emulation marks its own: what is
    wrong with them, the error all ranks see together, and the report.
    """
    section = Fp8Section(backend="emulated", **settings)
    parallel = init_parallel(mesh_of(layout), seed=1, timeout_s=60)
    try:
        model = build_model(read_spec(folder), parallel, torch.bfloat16)
        for product in (p for chunk in model for p in products(chunk)):
            for kind, layer, recipe in marks:
                if kind not in (product.kind, "*") or (kind == "*" and product.layer is None):
                    continue
                if kind == "*" and "router" in product.kind:
                    continue
                if layer is None or layer == product.layer:
                    product.module.fp8 = recipe and Fp8Recipe.of(Fp8Section(**recipe))
        layers = model[0].config.num_layers
        problems = [str(p) for p in fp8_problems(examine(model, section), section, layers)]
        try:
            report = require_fp8({"megatron": model}, section, parallel.host)
            said = ""
        except MegarlError as e:
            report, said = None, f"{type(e).__name__}: {e}"
        lines = {name: describe(kinds) for name, kinds in (report or {}).items()}
        return {"problems": problems, "said": said, "report": report, "lines": lines}
    finally:
        parallel_state.destroy_model_parallel()


def alignments(rank: int, recipes: list[str]) -> list[tuple[int, int]]:
    """Ours and upstream's, which pads experts' tokens."""
    sections = [Fp8Section(recipe=recipe) for recipe in recipes]  # type: ignore[arg-type]
    return [
        (row_alignment(section), get_fp8_align_size(section.recipe))  # type: ignore[arg-type]
        for section in sections
    ]
