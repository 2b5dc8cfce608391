"""Forward and backward passes of packed rows through Megatron's pipeline schedules.

Loss scale
----------
``objective`` returns S, this rank's share of the loss; the wanted gradient is that of the plain sum
of S over microbatches, data- and context-parallel ranks. Megatron
(``calculate_per_token_loss=False``, a loss function that returns three values) divides each
microbatch's loss by ``max(num_tokens, 1)`` and by the number of microbatches M, and its DDP
averages gradients over the dp * cp ranks. Returning ``(S * M * dp * cp, 1)`` cancels all three::

    sum_ranks 1/(dp cp) sum_mb (S M dp cp) / 1 / M  =  sum_ranks sum_mb S

The experts' load-balancing loss has Megatron's own scale: what each of the dp * M rows has is
averaged, 1/(dp M) sum aux(row), over the row's true tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch.profiler import record_function

from megarl.actor.attention_packed import packed_seq_params
from megarl.actor.names import unwrap
from megarl.actor.setup import Parallel
from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.data.packing import local_index
from megarl.ops import logprob_entropy
from megarl.types import Coefficients, LossInputs, PackedBatch, StepMetrics

# Ranges that a profiler shows
TO_DEVICE, LOGPROBS, LOSS = "megarl/to_device", "megarl/logprobs", "megarl/loss"

# (row, positions of it that are here, the model's output or what follows from it) -> (loss, result)
OnOutput = Callable[[PackedBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]]
OnLogprobs = Callable[
    [PackedBatch, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]
]
# (chunk, number of the row, positions of it that are here, what computes its output) -> the output
Forward = Callable[[torch.nn.Module, int, torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]


def run_schedule(
    model: list[torch.nn.Module],
    rows: list[PackedBatch],
    parallel: Parallel,
    *,
    forward_only: bool,
    finish: OnOutput,
    forward: Forward | None = None,
) -> list[Any]:
    """Run every row through the pipeline; ``finish(row, index, output) -> (loss, result)`` on the
    last stage, of ``output`` [1, T / cp, ...] in the model's precision. Returns the results in row
    order there, an empty list elsewhere. ``model``: this stage's chunks, all of which see every
    row. ``forward``: is handed every forward pass to run it. Collective over the whole mesh."""
    one = torch.ones((), dtype=torch.int, device=parallel.device)
    config: Any = get_model_config(model[0])
    routed = config.num_moe_experts is not None  # routers are told which tokens are padding
    # Megatron's wrapper for bf16 would copy the logits to fp32; losses convert what they need.
    in_model_precision = {"fp32_output": False} if config.bf16 else {}

    def forward_step(
        source: Iterator[tuple[int, PackedBatch]], core: torch.nn.Module
    ) -> tuple[torch.Tensor, Any]:
        number, row = next(source)
        bounds = tuple(row.cu_seqlens.tolist())
        index = local_index(bounds, parallel.mesh.cp, parallel.at.cp)
        on = partial(local, index=index, device=parallel.device)
        with record_function(TO_DEVICE):
            tokens, positions = on(row.tokens)[None], on(row.positions)[None]
            padding = _padding(core, on(~row.valid), parallel) if routed else None
            packing = packed_seq_params(row.cu_seqlens.to(parallel.device))
        compute = partial(
            core,
            *(tokens, positions, None),
            packed_seq_params=packing,
            padding_mask=padding,
            **in_model_precision,
        )
        outputs = compute() if forward is None else forward(core, number, index, compute)

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            loss, result = finish(row, index, output)
            return loss, one.clone(), result

        return outputs, loss_func

    lengths = {len(row.tokens) for row in rows}
    # Stages then tell each other the shape of what they send. All have rows of the same lengths.
    config.variable_seq_lengths = parallel.mesh.pp > 1 and len(lengths) > 1
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(enumerate(rows)) for _ in model],
        model=model,
        num_microbatches=len(rows),
        seq_length=max(lengths),
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def _padding(core: Any, padding: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """bool [1, T / cp], True at padding, for the routers. Where tensor parallelism splits the
    sequence, upstream cuts it up in the chunk that holds the embedding and forgets to in the rest.
    """
    if parallel.mesh.sequence_parallel and not unwrap(core).pre_process:
        padding = padding.chunk(parallel.mesh.tp)[parallel.at.tp]
    return padding[None]


def on_logprobs(
    finish: OnLogprobs, parallel: Parallel, *, temperature: float, vocab_size: int
) -> OnOutput:
    """``finish(row, index, logprobs, entropy)`` of a policy, whose outputs are logits."""

    def of_logits(
        row: PackedBatch, index: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        with record_function(LOGPROBS):
            logprobs, entropy = logprob_entropy(
                output.squeeze(0),  # not output[0], whose backward would copy the gradient
                local(row.targets, index=index, device=parallel.device),
                vocab_size=vocab_size,
                temperature=temperature,
                group=parallel.tp,
                inplace_backward=True,  # the output layer keeps its input, nobody the logits
            )
        return finish(row, index, logprobs, entropy)

    return of_logits


def record_old(parallel: Parallel) -> OnLogprobs:
    """Keep log-probs and entropies as the row's ``old_logprobs`` and ``old_entropy``."""

    def finish(
        row: PackedBatch, index: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        row.old_logprobs, row.old_entropy = whole_row(row, parallel, logprobs, entropy)
        return logprobs.sum() * 0.0, None

    return finish


def record_reference(parallel: Parallel) -> OnLogprobs:
    """Keep log-probs as the row's ``ref_logprobs``."""

    def finish(
        row: PackedBatch, index: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        (row.ref_logprobs,) = whole_row(row, parallel, logprobs)
        return logprobs.sum() * 0.0, None

    return finish


def whole_row(
    row: PackedBatch, parallel: Parallel, *values: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """f32 [T] each on the host, from what the context-parallel ranks hold, [T / cp]. Collective
    over them.
    """
    local = torch.stack([v.detach().float() for v in values])
    cp = parallel.mesh.cp
    parts = [torch.empty_like(local) for _ in range(cp)]
    dist.all_gather(parts, local, group=parallel.cp)
    whole = torch.empty(len(values), len(row.tokens))
    bounds = tuple(row.cu_seqlens.tolist())
    for rank, part in enumerate(parts):
        whole[:, local_index(bounds, cp, rank)] = part.cpu()
    return whole.unbind()


@dataclass(frozen=True)
class RowResult:
    """Of one row: metrics; ``bad``, trained tokens that were not finite, and ``output``, what the
    model said of each, both [T] of the whole row and None where all were finite.
    """

    metrics: StepMetrics
    bad: torch.Tensor | None = None
    output: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        metrics: StepMetrics,
        row: PackedBatch,
        index: torch.Tensor,
        bad: torch.Tensor,
        output: torch.Tensor,
    ) -> "RowResult":
        """``bad``, ``output``: at the row's positions ``index``."""
        found = bad.cpu()
        if not found.any():
            return cls(metrics)
        everywhere = torch.zeros(len(row.tokens), dtype=torch.bool)
        everywhere[index] = found
        numbers = torch.full((len(row.tokens),), torch.nan)
        numbers[index] = output.detach().float().cpu()
        return cls(metrics, everywhere, numbers)


def loss_scale(parallel: Parallel, num_microbatches: int) -> int:
    """S of the module docstring times this is what a loss function returns."""
    return num_microbatches * parallel.mesh.dp * parallel.mesh.cp


def samples_at(row: PackedBatch, positions: torch.Tensor) -> list[int]:
    """The samples that lie at any of the row's ``positions``."""
    return [
        i
        for i, start, n in row.segments()
        if ((positions >= start) & (positions < start + n)).any()
    ]


def policy_loss(
    objective: Objective, coefficients: Coefficients, parallel: Parallel, num_microbatches: int
) -> OnLogprobs:
    """The training loss with the scale of the module docstring."""
    scale = loss_scale(parallel, num_microbatches)

    def finish(
        row: PackedBatch, index: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, RowResult]:
        with record_function(TO_DEVICE):
            inputs = loss_inputs(row, index, parallel.device, logprobs, entropy)
            segments = Segments(row.cu_seqlens.to(parallel.device) // parallel.mesh.cp, parallel.cp)
        with record_function(LOSS):
            found = objective(inputs, segments, coefficients)
        metrics = found.metrics if parallel.speaks_for_tokens else []
        result = RowResult.of(metrics, row, index, found.dropped, logprobs)
        return (found.loss * scale).float(), result

    return finish


def loss_inputs(
    row: PackedBatch,
    index: torch.Tensor,
    device: torch.device,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
) -> LossInputs:
    """The row as its loss sees it on the rank that holds positions ``index``."""

    def on(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else local(values, index=index, device=device)

    old = row.rollout_logprobs if row.old_logprobs is None else row.old_logprobs
    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=local(old, index=index, device=device),
        rollout_logprobs=local(row.rollout_logprobs, index=index, device=device),
        advantages=local(row.advantages, index=index, device=device),
        weight=local(row.weight, index=index, device=device),
        mask=local(row.mask, index=index, device=device),
        ref_logprobs=on(row.ref_logprobs),
        correction=on(row.correction),
        selected=on(row.selected),
    )


def local(values: torch.Tensor, *, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values[index].to(device)
