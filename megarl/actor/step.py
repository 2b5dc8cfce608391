"""Forward and backward passes of packed rows through Megatron's pipeline schedules.

Loss scale
----------
``objective`` returns S, this rank's share of the loss; the wanted gradient is that of the plain sum
of S over microbatches, data- and context-parallel ranks. Megatron
(``calculate_per_token_loss=False``, a loss function that returns three values) divides each
microbatch's loss by ``max(num_tokens, 1)`` and by the number of microbatches M, and its DDP
averages gradients over the dp * cp ranks. Returning ``(S * M * dp * cp, 1)`` cancels all three::

    sum_ranks 1/(dp cp) sum_mb (S M dp cp) / 1 / M  =  sum_ranks sum_mb S
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.actor.attention_packed import local_index, packed_seq_params
from megarl.actor.logprobs import logprob_and_entropy
from megarl.actor.setup import Parallel
from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.types import LossInputs, PackedBatch, StepMetrics

OnLogits = Callable[
    [PackedBatch, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]
]


def run_schedule(
    model: list[torch.nn.Module],
    rows: list[PackedBatch],
    parallel: Parallel,
    *,
    forward_only: bool,
    temperature: float,
    vocab_size: int,
    finish: OnLogits,
) -> list[Any]:
    """Run every row through the pipeline; ``finish(row, index, logprobs, entropy) -> (loss,
    result)`` on the last stage. Returns the results in row order there, an empty list elsewhere.
    ``model``: this stage's chunks, all of which see every row. Collective over the whole mesh."""
    one = torch.ones((), dtype=torch.int, device=parallel.device)

    def forward_step(
        source: Iterator[PackedBatch], core: torch.nn.Module
    ) -> tuple[torch.Tensor, Any]:
        row = next(source)
        bounds = tuple(row.cu_seqlens.tolist())
        index = local_index(bounds, parallel.mesh.cp, parallel.at.cp)
        on = partial(_local, index=index, device=parallel.device)
        logits = core(
            on(row.tokens)[None],
            on(row.positions)[None],
            None,
            packed_seq_params=packed_seq_params(row.cu_seqlens.to(parallel.device)),
        )

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            logprobs, entropy = logprob_and_entropy(
                output[0],
                on(row.targets),
                vocab_size=vocab_size,
                temperature=temperature,
                group=parallel.tp,
            )
            loss, result = finish(row, index, logprobs, entropy)
            return loss, one.clone(), result

        return logits, loss_func

    length = len(rows[0].tokens)
    assert all(len(r.tokens) == length for r in rows), "rows of one step share a length"
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows) for _ in model],
        model=model,
        num_microbatches=len(rows),
        seq_length=length,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return results


def record_logprobs(
    row: PackedBatch, index: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Keep the log-probs as the row's ``old_logprobs`` (local to this context-parallel rank)."""
    row.old_logprobs = logprobs.detach()
    return logprobs.sum() * 0.0, None


def policy_loss(objective: Objective, parallel: Parallel, num_microbatches: int) -> OnLogits:
    """The training loss with the scale of the module docstring."""
    mesh = parallel.mesh
    scale = num_microbatches * mesh.dp * mesh.cp

    def finish(
        row: PackedBatch, index: torch.Tensor, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> tuple[torch.Tensor, StepMetrics]:
        on = partial(_local, index=index, device=parallel.device)
        rollout = on(row.rollout_logprobs)
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=rollout if row.old_logprobs is None else row.old_logprobs,
            rollout_logprobs=rollout,
            advantages=on(row.advantages),
            weight=on(row.weight),
            mask=on(row.mask),
        )
        segments = Segments(row.cu_seqlens.to(parallel.device) // mesh.cp, parallel.cp)
        loss, metrics = objective(inputs, segments)
        return (loss * scale).float(), metrics if parallel.speaks_for_tokens else []

    return finish


def _local(values: torch.Tensor, *, index: torch.Tensor, device: torch.device) -> torch.Tensor:
    return values[index].to(device)
