"""Log-prob and entropy of the sampled tokens from vocabulary-parallel logits.

With z the logits over temperature, p = softmax(z) over the true vocabulary (padding columns have p
= 0)::

    lp_t = z_y - lse(z)          H_t = lse(z) - sum_v p_v z_v
    d(g lp + h H)/dz_v = (1/temperature) [ g (1[v = y] - p_v) - h p_v (log p_v + H) ]

Every tensor-parallel rank holds V/tp columns. Forward: one max and one sum all-reduce of 3 numbers
a token; backward: none, each rank computes its own columns. Everything in fp32 (fp64 for fp64
logits). A token whose two gradients are 0 adds exact zeros, also where its logits are NaN. Source:
docs/objectives.md, "Entropy, log-prob backward".
"""

from typing import Any

import torch
import torch.distributed as dist


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits_TV.size(-1)
        first = group.rank() * width if group is not None else 0
        z = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)) / temperature
        if (
            first + width > vocab_size
        ):  # padding columns of the last ranks: never part of the softmax
            z[:, max(0, vocab_size - first) :] = float("-inf")
        top = z.max(dim=-1).values
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        z.sub_(top[:, None])
        e = z.exp()
        local = targets_T - first
        mine = (local >= 0) & (local < width)
        z_y = z.gather(1, local.clamp(0, width - 1)[:, None]).squeeze(1)
        sums = torch.stack(
            [e.sum(-1), torch.where(mine, z_y, 0.0), torch.where(e > 0, e * z, 0.0).sum(-1)]
        )
        if group is not None:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(z.sub_(log_sum[:, None]), entropy, local, mine)  # z is now log p
        ctx.temperature, ctx.dtype = temperature, logits_TV.dtype
        return sums[1] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        g_T, h_T = grads
        logp, entropy, local, mine = ctx.saved_tensors
        p = logp.exp()
        grad = torch.where(p > 0, p * (logp + entropy[:, None]), 0.0).mul_(-h_T[:, None])
        grad.sub_(p * g_T[:, None])
        rows = mine.nonzero().squeeze(1)
        grad[rows, local[rows]] += g_T[rows]
        grad.masked_fill_(((g_T == 0) & (h_T == 0))[:, None], 0.0)
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None


def logprob_and_entropy(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs f32 [T], entropy f32 [T], nats) of ``targets_T`` i64 [T] under ``logits_TV`` [T,
    V/tp]; f64 for f64 logits.

    Collective over ``group`` (the tensor-parallel group; None: one rank holds all columns);
    differentiable in the logits.
    """
    lp, entropy = _LogprobEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, vocab_size, temperature, group
    )
    return lp, entropy
