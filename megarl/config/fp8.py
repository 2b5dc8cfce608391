"""Matrix products of the layers in FP8."""

from collections.abc import Mapping, MutableMapping
from typing import Literal

from megarl.config.section import NonNegative, Positive, Section


class Fp8Section(Section):
    """Matrix products of attention and feed-forward parts, experts included, in FP8: forward,
    gradients of inputs and gradients of weights. Norms, embeddings, routers, attention itself and
    the output layer or value head stay as ``precision.dtype`` has them, which must be bf16. Policy
    and critic alike. A layer that was to be in FP8 and is not ends the run. docs/fp8.md.
    """

    backend: Literal["te", "emulated"] = "te"
    """te: Transformer Engine, on a GPU that has FP8. emulated: the same rounding computed with
    Megatron's own layers on any machine, several times slower; to see what FP8 does to a run.
    """
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "blockwise"
    """What shares a scale. tensorwise: a tensor, by its present largest entry. delayed: a tensor,
    by the largest entries of steps before. blockwise: 128 x 128 of a weight, 1 x 128 of inputs and
    gradients (DeepSeek-V3). mxfp8: 32 entries in a row, with Blackwell GPUs.
    """
    format: Literal["e4m3", "hybrid"] = "e4m3"
    """e4m3: of everything. hybrid: output gradients are e5m2."""
    scales: Literal["f32", "power_of_two"] = "f32"
    """blockwise: how a block's scale is rounded. As the rollout server has it, or trainer and
    server quantise the same weights to different codes.
    """
    param_gather: bool = False
    """te: parameters are kept and gathered over data-parallel ranks in FP8. Needs
    optim.distributed.
    """
    first_layers_bf16: NonNegative = 0
    """So many layers at the start of the model stay bf16; not with delayed."""
    last_layers_bf16: NonNegative = 0
    """So many layers at its end."""
    amax_history: Positive = 1024
    """delayed: steps whose largest entries count."""
    amax_algo: Literal["max", "most_recent"] = "max"
    """delayed: the largest of them, or the last."""
    margin: NonNegative = 0
    """delayed: scales are smaller by 2^margin."""


def row_alignment(section: Fp8Section | None) -> int:
    """What the number of tokens on a rank must divide by: the contraction of a weight gradient runs
    over tokens, and Transformer Engine multiplies whole groups of 16, or blocks of 32.
    """
    if section is None or section.backend != "te":
        return 1
    return 32 if section.recipe == "mxfp8" else 16


# What Transformer Engine reads from the environment when it is imported, by recipe: the values that
# settings ask for. NVTE_BACKWARD_OVERRIDE would compute gradients in another precision than asked.
SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
_POWERS = "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"
_BACKWARD = "NVTE_BACKWARD_OVERRIDE"


def te_environment(section: Fp8Section | None) -> dict[str, str | None]:
    """Variables and the value each must have when Transformer Engine is imported; None: not set."""
    if section is None or section.backend != "te":
        return {}
    wanted: dict[str, str | None] = {_BACKWARD: None}
    if section.recipe == "blockwise":
        wanted[SCALES] = "1" if section.scales == "f32" else "0"
    if section.recipe == "tensorwise":
        wanted[_POWERS] = "0"
    return wanted


def set_te_environment(section: Fp8Section | None, environment: MutableMapping[str, str]) -> None:
    """What ``te_environment`` wants into an environment that does not contradict it
    (``fp8_rules.py`` refuses those). Before anything of Megatron is imported.
    """
    wanted = te_environment(section)
    environment.update({name: value for name, value in wanted.items() if value is not None})


def contradictions(section: Fp8Section | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that are set to something else, with what they are set to."""
    return {
        name: environment[name]
        for name, value in te_environment(section).items()
        if name in environment and environment[name] != value
    }
