"""Advantages a token, by recurrences over packed rows: GAE and REINFORCE++'s returns.

A sequence's steps are its trained tokens u_1 < ... < u_K only: what lies between (tool output, the
prompt) has no value, no discount and advantage 0. Everything in float64 on the host.

GAE (arXiv 1506.02438), V_{K+1} = ``bootstrap``, A_{K+1} = 0::

    delta_k = r_k + gamma V_{k+1} - V_k        A_k = delta_k + gamma lam A_{k+1}
    return_k = A_k + V_k

REINFORCE++ (arXiv 2501.03262)::

    return_k = r_k + gamma return_{k+1}
"""

from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    bootstrap: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    masked_reward: Literal["credit_prev", "drop"] = "credit_prev",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) f64 [T], 0 where masked.

    ``rewards``, ``values`` f32|f64 [T] (values of the state before token t), ``mask`` bool [T],
    ``cu_seqlens`` i32 [S + 1], ``bootstrap`` [S]: value after a sequence's last trained token, 0
    where it ended. ``masked_reward``: a reward on a token that is not trained counts for the
    trained token before it, or not at all.
    """
    if masked_reward == "credit_prev":
        rewards = credit_previous(rewards, mask, cu_seqlens)
    steps = _Steps(mask, cu_seqlens)
    r, v = steps.padded(rewards), steps.padded(values)
    after = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1)
    filled = steps.lengths > 0
    after[filled, steps.lengths[filled] - 1] = bootstrap.double()[filled]
    advantages = _discounted(r + gamma * after - v, gamma * lam)
    return steps.scattered(advantages), steps.scattered(advantages + v)


def discounted_returns(
    rewards: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, *, gamma: float
) -> torch.Tensor:
    """f64 [T]: the rewards of this and all later trained tokens, discounted once a trained token; 0
    where masked.
    """
    steps = _Steps(mask, cu_seqlens)
    return steps.scattered(_discounted(steps.padded(rewards), gamma))


def at_last_trained(
    values_S: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """f64 [T]: ``values_S`` [S] at every sequence's last trained token, 0 elsewhere."""
    steps = _Steps(mask, cu_seqlens)
    out = torch.zeros(len(mask), dtype=torch.float64)
    filled = steps.lengths > 0
    last = steps.lengths[filled].cumsum(0) - 1
    out[steps.positions[last]] = values_S.double()[filled]
    return out


def credit_previous(
    rewards: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """f64 [T]: rewards of masked tokens moved to the trained token before them in their sequence.

    Before a sequence's first trained token there is none: nothing that was decided earned them.
    """
    total = len(mask)
    here = torch.where(mask, torch.arange(total), -1)
    previous = here.cummax(0).values if total else here
    start = (cu_seqlens[:-1].long()).repeat_interleave((cu_seqlens[1:] - cu_seqlens[:-1]).long())
    earned = previous >= start
    out = torch.zeros(total, dtype=torch.float64)
    # garbage may lie on masked tokens' other fields, but a reward there is a reward
    return out.index_add(0, previous[earned], rewards.double()[earned])


class _Steps:
    """The trained tokens of every sequence as a padded matrix [S, K], and back."""

    def __init__(self, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
        self.total = len(mask)
        self.positions = mask.nonzero().squeeze(1)
        before = torch.cat([torch.zeros(1, dtype=torch.long), mask.long().cumsum(0)])
        self.lengths = before[cu_seqlens[1:].long()] - before[cu_seqlens[:-1].long()]

    def padded(self, values_T: torch.Tensor) -> torch.Tensor:
        parts = values_T.double()[self.positions].split(self.lengths.tolist())
        return pad_sequence(list(parts), batch_first=True)

    def scattered(self, values_SK: torch.Tensor) -> torch.Tensor:
        inside = torch.arange(values_SK.shape[1]) < self.lengths[:, None]
        out = torch.zeros(self.total, dtype=torch.float64)
        out[self.positions] = values_SK[inside]
        return out


def _discounted(values_SK: torch.Tensor, factor: float) -> torch.Tensor:
    """y_k = x_k + factor y_{k+1}, row by row."""
    out = values_SK.clone()
    for k in range(values_SK.shape[1] - 2, -1, -1):
        out[:, k] += factor * out[:, k + 1]
    return out
