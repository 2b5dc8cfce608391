"""Matrix products of the layers in FP8."""

from typing import Literal

from megarl.config.section import AtLeast0, NonNegative, Positive, Section


class Fp8Section(Section):
    """Matrix products of attention and feed-forward parts, experts included, in FP8: forward,
    gradients of inputs and gradients of weights. Norms, embeddings, routers and the output layer
    stay as ``precision.dtype`` has them, which must be bf16.
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
    """te: parameters are kept and gathered over data-parallel ranks in FP8."""
    first_layers_bf16: NonNegative = 0
    """So many layers at the start of the model stay bf16."""
    last_layers_bf16: NonNegative = 0
    """So many layers at its end."""
    amax_history: Positive = 1024
    """delayed: steps whose largest entries count."""
    amax_algo: Literal["max", "most_recent"] = "max"
    """delayed: the largest of them, or the last."""
    margin: AtLeast0 = 0.0
    """delayed: scales are smaller by 2^margin."""
