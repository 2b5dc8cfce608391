"""FP8 matrix products: what Megatron is built with, by backend. Whether the built model computes
them is asked in ``fp8_active.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from megatron.core.models.gpt.gpt_model import GPTModel

from megarl.actor.fp8_emulated import emulate_fp8
from megarl.actor.setup import Parallel
from megarl.config.fp8 import Fp8Section


def fp8_options(section: Fp8Section | None) -> dict[str, Any]:
    """Of TransformerConfig."""
    if not _engine(section):
        return {}
    ends = section.first_layers_bf16 + section.last_layers_bf16
    return {
        "fp8": section.format,
        "fp8_recipe": section.recipe,
        "fp8_param": section.param_gather,
        "fp8_margin": section.margin,
        "fp8_amax_history_len": section.amax_history,
        "fp8_amax_compute_algo": section.amax_algo,
        "fp8_wgrad": True,
        "first_last_layers_bf16": ends > 0,
        "num_layers_at_start_in_bf16": section.first_layers_bf16,
        "num_layers_at_end_in_bf16": section.last_layers_bf16,
        # Experts pad their own tokens to what the recipe needs, with zeros that no scale depends
        # on. The router would fill up with tokens that were routed elsewhere.
        "moe_router_padding_for_quantization": False,
    }


def fp8_ddp_options(section: Fp8Section | None) -> dict[str, Any]:
    """Of DistributedDataParallelConfig."""
    if not _engine(section):
        return {}
    return {
        "fp8_param_gather": section.param_gather,
        "reuse_grad_buf_for_mxfp8_param_ag": _gathers_in_gradients(section),
    }


def fp8_optimizer_options(section: Fp8Section | None) -> dict[str, Any]:
    """Of OptimizerConfig."""
    if not _engine(section):
        return {}
    return {
        "fp8_recipe": section.recipe,
        "reuse_grad_buf_for_mxfp8_param_ag": _gathers_in_gradients(section),
    }


def _engine(section: Fp8Section | None) -> TypeGuard[Fp8Section]:
    return section is not None and section.backend == "te"


def _gathers_in_gradients(section: Fp8Section) -> bool:
    """mxfp8 parameters cannot be views of a flat buffer; they are gathered through that of the
    gradients, which is cleared before the next step.
    """
    return section.param_gather and section.recipe == "mxfp8"


def install_fp8(model: Sequence[GPTModel], parallel: Parallel, section: Fp8Section | None) -> None:
    """What the backend does to chunks that are built, before they hold weights. Collective."""
    if section is not None:
        _INSTALL[section.backend](model, parallel, section)


def _nothing(model: Sequence[GPTModel], parallel: Parallel, section: Fp8Section) -> None:
    """Transformer Engine's modules are made so (``fp8_options``)."""


_INSTALL: Mapping[str, Callable[[Sequence[GPTModel], Parallel, Fp8Section], None]] = {
    "te": _nothing,
    "emulated": emulate_fp8,
}
