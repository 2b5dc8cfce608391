"""Moments and range of the rewards of every group, in float64.

Shapes: N samples in any order, G groups numbered 0 ... G-1::

    n = number of counted samples     mean = sum of R / n     M2 = sum of (R - mean)^2
    min, max of R                     over the counted samples of the group

1. Two passes over the samples in their order, so equal inputs give equal bits. (On CUDA a group is
   summed in another, fixed order.)
2. A group is flat where min == max, exactly; M2 == 0 is not it: the mean of seven times 0.1 is not
   0.1.
3. A sample that is not counted is not looked at. An empty group: n, mean, M2 0, min inf, max -inf.
4. Not differentiable: rewards are data.
"""

import math

import torch
from torch import Tensor

from megarl.ops._arguments import check_dim, check_mask, check_row, check_type
from megarl.ops._native import native_devices, runs_native
from megarl.ops._selfcheck import self_check


def group_moments(rewards: Tensor, group: Tensor, counted: Tensor, num_groups: int) -> Tensor:
    """(n, mean, M2, min, max) f64 [5, G]: rewards f64 [N], group i64 [N], counted bool [N].

    RuntimeError, with the numbers, for a group that is not in [0, G).
    """
    if runs_native("group_moments", rewards.device):
        out: Tensor = torch.ops.megarl.group_moments(rewards, group, counted, num_groups)
        return out
    return group_moments_ref(rewards, group, counted, num_groups)


def group_moments_ref(rewards: Tensor, group: Tensor, counted: Tensor, num_groups: int) -> Tensor:
    """The specification of `group_moments`, in plain torch."""
    _check_types(rewards, group, counted, num_groups)
    outside = ((group < 0) | (group >= num_groups)).nonzero()
    if len(outside):
        i = int(outside[0])
        raise RuntimeError(
            f"group_moments: group must be in [0, {num_groups}), got {int(group[i])} at entry {i}"
        )
    where, x = group[counted], rewards[counted]
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=rewards.device)
    n = zeros.index_add(0, where, torch.ones_like(x))
    mean = zeros.index_add(0, where, x) / n.clamp(min=1)
    m2 = zeros.index_add(0, where, (x - mean[where]) ** 2)
    low = torch.full_like(zeros, math.inf).scatter_reduce(0, where, x, "amin")
    high = torch.full_like(zeros, -math.inf).scatter_reduce(0, where, x, "amax")
    return torch.stack([n, mean, m2, low, high])


def _check_types(rewards: Tensor, group: Tensor, counted: Tensor, num_groups: int) -> None:
    check_dim("group_moments", "rewards", rewards, 1)
    check_type("group_moments", "rewards", rewards, torch.float64)
    check_row("group_moments", "group", group, rewards)
    check_type("group_moments", "group", group, torch.int64)
    check_mask("group_moments", "counted", counted, rewards)
    if num_groups < 0:
        raise RuntimeError(f"group_moments: num_groups must be at least 0, got {num_groups}")


def _fake(rewards: Tensor, group: Tensor, counted: Tensor, num_groups: int) -> Tensor:
    _check_types(rewards, group, counted, num_groups)
    return rewards.new_empty(5, num_groups)


if native_devices("group_moments"):
    torch.library.register_fake("megarl::group_moments", _fake)


@self_check("group_moments")
def _check(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(3001, generator=generator, dtype=torch.float64)
    group = torch.randint(0, 300, (3001,), generator=generator)
    counted = (torch.rand(3001, generator=generator) < 0.9) & (group != 7)
    rewards[~counted] = math.nan
    case = (rewards, group, counted)
    found = torch.ops.megarl.group_moments(*(x.to(device) for x in case), 301)
    torch.testing.assert_close(found.cpu(), group_moments_ref(*case, 301), rtol=1e-12, atol=1e-12)
