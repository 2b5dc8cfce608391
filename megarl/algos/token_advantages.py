"""Advantages a token, by recurrences over packed rows. The recurrences are `megarl.ops.gae`."""

from typing import Literal

import torch

from megarl import ops


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
    """(advantages, returns) f64 [T], 0 where masked; arguments as of `megarl.ops.gae`.

    ``masked_reward``: a reward on a token that is not trained counts for the trained token before
    it, or not at all.
    """
    return ops.gae(
        rewards,
        values,
        mask,
        cu_seqlens,
        bootstrap,
        gamma=gamma,
        lam=lam,
        credit_previous={"credit_prev": True, "drop": False}[masked_reward],
    )


def at_last_trained(
    values_S: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """f64 [T]: ``values_S`` [S] at every sequence's last trained token, 0 elsewhere."""
    out = torch.zeros(len(mask), dtype=torch.float64)
    # before a row's first trained token: -1, which lies in no sequence
    last = torch.cat([torch.tensor([-1]), torch.where(mask, torch.arange(len(mask)), -1)])
    last = last.cummax(0).values[cu_seqlens[1:].long()]
    filled = last >= cu_seqlens[:-1]
    out[last[filled]] = values_S.double()[filled]
    return out
