"""What evaluating an objective on a row gives."""

from dataclasses import dataclass

import torch

from megarl.algos.ratio import Row
from megarl.algos.surrogates import TokenLoss


@dataclass(frozen=True)
class Evaluation:
    """A row's loss in its parts, all detached. f64 scalars; ``token`` and ``coef`` as in
    ``Row``; gradients f64 [T]. ``dropped``: bool [T], trained tokens that were not finite.
    """

    loss: torch.Tensor
    pg_loss: torch.Tensor
    kl_loss: torch.Tensor  # with its coefficient
    entropy_loss: torch.Tensor  # with its coefficient and sign
    grad_logprobs: torch.Tensor
    grad_entropy: torch.Tensor
    token: TokenLoss
    row: Row
    kl: torch.Tensor | None  # k of every token
    entropy: torch.Tensor
    keep_sequence: torch.Tensor  # bool [S], False where switched off as off-policy
    dropped: torch.Tensor
