"""Settings that are Megatron's own: what the model, its data-parallel wrapper and its optimizer are
built with (``actor/options.py`` hands them on).

Named as Megatron names them, without the section's name in front. What one of them needs, of the
layout, the model or the machine, is in ``hardware.py`` and ``unused.py``.
"""

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.section import Above0, AtLeast0, Positive, Section


class RecomputeSection(Section):
    """Activations that are computed again in the backward pass instead of being kept."""

    granularity: Literal["none", "selective", "full"] = "none"
    """selective: the parts in ``modules`` of every layer. full: whole layers, of which only the
    input is kept. Loss and gradients are the same bits either way. docs/memory.md.
    """
    modules: tuple[
        Literal["core_attn", "layernorm", "mlp", "moe", "shared_experts", "mla_up_proj"], ...
    ] = ("core_attn",)
    """selective: what is computed again. core_attn: attention without its projections. mlp: dense
    layers' feed-forward. moe: router, dispatch and experts. shared_experts: these alone. layernorm
    and mla_up_proj: norms, and the up-projections of latent attention, with Transformer Engine.
    """
    method: Literal["uniform", "block"] = "uniform"
    """full: uniform keeps the input of every ``num_layers``-th layer; block recomputes the first
    ``num_layers`` layers of each chunk of a pipeline stage and keeps the others whole.
    """
    num_layers: Positive = 1
    """full: see ``method``."""


class OverlapSection(Section):
    """Communication that runs while something else is computed. No number depends on it.

    The exchange between pipeline stages is always overlapped where the schedule can: with
    parallel.vpp above 1.
    """

    grad_reduce: bool = False
    """Gradients are reduced over the data-parallel ranks, bucket by bucket, during the last
    backward pass of an optimizer step.
    """
    param_gather: bool = False
    """New parameters are gathered bucket by bucket during the next forward pass; those of a step's
    last update at once, as they are sent on. Needs ``grad_reduce`` and optim.distributed.
    """
    moe_shared_expert: bool = False
    """Shared experts are computed while tokens travel to the routed ones."""


class MoeSection(Section):
    """Experts: dispatch, router and balancing."""

    token_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach the ranks of their experts. allgather: every rank gets all tokens, which
    can be faster where ep is small and topk large. flex: by ``flex_backend``.
    """
    flex_backend: Literal["deepep", "hybridep"] = "deepep"
    """flex: DeepEP, or its hybrid kernels, both from the package deep_ep."""
    permute_fusion: bool = False
    """Tokens are sorted by expert in one fused kernel (Transformer Engine 2.1)."""
    router_fusion: bool = False
    """Top-k choice and balancing loss in one fused kernel (Transformer Engine 2.7)."""
    grouped_gemm: bool = False
    """A rank's experts in one grouped matrix product (Transformer Engine), not one after another.
    """
    routing_replay: Literal["none", "old_logprobs", "rollout"] = "none"
    """Whose choice of experts the policy trains with; gate weights are its own either way.
    old_logprobs (R2): that of the pass which gives old log-probs. rollout (R3): the rollout
    server's, in that pass too. docs/routing-replay.md.
    """
    router_dtype: Literal["fp32", "fp64"] = "fp32"
    """Of the router's logits, probabilities and of the weighted sum of experts."""
    aux_loss_coeff: AtLeast0 = 0.0
    """Weight of the experts' load-balancing loss. It is a mean over rows, so its gradient depends
    on how samples are packed and split; 0, the default, leaves it out. docs/routers.md.
    """
    z_loss_coeff: AtLeast0 = 0.0
    """Weight of the squared log-sum-exp of the router's logits, a mean over rows likewise."""
    router_bias_update_rate: AtLeast0 = 0.0
    """Of models whose router has a bias per expert that balances without a loss (DeepSeek-V3): how
    far it moves in an optimizer step. 0 keeps it: what moves the choice of experts without a
    gradient also moves it away from what the servers sampled with.
    """


class ScheduleSection(Section):
    """Learning rate and weight decay by optimizer step n of N. Warm-up is ``optim.warmup_steps``
    long in all of them; min is ``optim.min_lr_ratio * optim.lr``.
    """

    lr: Literal["wsd", "constant", "linear", "cosine", "inverse_square_root"] = "wsd"
    """wsd: constant, then falling to min over the last ``optim.decay_fraction`` of the run. linear,
    cosine: falling to min from the end of warm-up to the end of the run. inverse_square_root:
    lr * sqrt(w / n) with w = max(warmup_steps, 1), not below min.
    """
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """wsd: how it falls, as a share of lr - min at progress p: 1 - p, (1 + cos(pi p)) / 2,
    2 * 0.5^p - 1, or 1 - sqrt(p).
    """
    weight_decay: Literal["constant", "linear", "cosine"] = "constant"
    """From ``optim.weight_decay`` to ``end_weight_decay`` over the run, at progress n / N."""
    end_weight_decay: AtLeast0 | None = None
    """linear, cosine: weight decay at the end of the run; at least ``optim.weight_decay``."""


class MuonSection(Section):
    """Muon's own settings; ``optim.betas`` and ``eps`` are of AdamW, which updates what is not a
    matrix of a linear layer.
    """

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    nesterov: bool = False
    num_ns_steps: Positive = 5
    """Newton-Schulz iterations that make a matrix orthogonal."""
    scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """How the size of an update follows the matrix's shape."""
    extra_scale_factor: Above0 = 1.0
    """Of every update, besides. With 0.2 and spectral, AdamW's learning rates fit."""
    tp_mode: Literal["blockwise", "duplicated", "distributed"] = "blockwise"
    """Matrices that tensor parallelism splits: orthogonal each shard by itself, or as a whole,
    computed on every rank or shared out.
    """


class PrecisionAwareSection(Section):
    """Optimizer state in fewer bits, by Transformer Engine's FusedAdam (2.1). Gradients are held in
    ``precision.grad_reduce_dtype``. docs/memory.md.
    """

    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    exp_avg_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"


class CpuOffloadSection(Section):
    """Optimizer state and update in host memory. docs/memory.md."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the parameters."""
    overlap: bool = True
    """Gradients and parameters travel while others are updated."""
