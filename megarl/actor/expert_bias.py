"""The experts' bias, which keeps their loads alike without a loss.

An expert bias (Wang et al. 2024, arXiv:2408.15664; DeepSeek-V3) moves the choice of experts and not
their gate weights. After an optimizer step, with c_e the tokens that expert e got in it, of all
ranks and microbatches, and E experts::

    bias_e += rate * sign(mean(c) - c_e)  =  rate * sign(sum(c) - E c_e)

Counts are integers, so the bias has the same bits in every layout. Only true tokens of the passes
that made the step's gradients count (``router.py``). A step that is not taken moves nothing, and a
bias stays whose router is frozen, or that is frozen itself (``train.frozen``).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megarl.actor.router import Router


def forget_routed(chunks: Sequence[torch.nn.Module]) -> None:
    """A new optimizer step begins."""
    for router in routers_of(chunks):
        router.routed.zero_()
        router.record.forget()


def move_expert_bias(
    chunks: Sequence[torch.nn.Module], rate: float, stage: dist.ProcessGroup
) -> None:
    """The update above. Collective over ``stage``, all ranks that hold these layers."""
    routers = [r for r in routers_of(chunks) if r.expert_bias is not None and _moves(r)]
    if not routers or rate == 0:
        return
    counts = torch.stack([router.routed for router in routers])
    dist.all_reduce(counts, group=stage)
    direction = torch.sign(counts.sum(1, keepdim=True) - counts.size(1) * counts)
    for router, move in zip(routers, direction, strict=True):
        router.expert_bias += rate * move


def _moves(router: Router) -> bool:
    return router.weight.requires_grad and not router.keeps_bias


def routers_of(chunks: Sequence[torch.nn.Module]) -> Iterator[Router]:
    for chunk in chunks:
        yield from (m for m in chunk.modules() if isinstance(m, Router))
