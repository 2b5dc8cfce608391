"""What evaluating an objective on a row gives, and what its metrics are made of."""

from dataclasses import dataclass

import torch

from megarl.algos.diagnostics import RatioSums, RowSums
from megarl.algos.kl import k3
from megarl.algos.ratio import LOG_RATIO_LIMIT, Row, clamped
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
    seq_flags: dict[str, torch.Tensor]

    def sums(self, all_metrics: bool = True) -> RowSums:
        mask = self.row.mask

        def total(values: torch.Tensor) -> float:
            return float(values[mask].double().sum())

        each = self.token.flags | (self.token.means if all_metrics else {})
        return RowSums(
            tokens=float(mask.sum()),
            dropped=float(self.dropped.sum()),
            pg_loss=float(self.pg_loss),
            kl_loss=float(self.kl_loss),
            entropy_loss=float(self.entropy_loss),
            entropy=total(self.entropy),
            kl=None if self.kl is None else total(self.kl),
            of_tokens={name: total(values) for name, values in each.items()},
            ratios=_ratio_sums(self.row),
            sequences=self.row.sums,
            kept=self.keep_sequence,
            seq_flags=self.seq_flags,
        )


def _ratio_sums(row: Row) -> RatioSums:
    raw = row.log_ratio[row.mask]
    d = clamped(raw)
    ratio = d.exp().double()
    return RatioSums(
        approx_kl_k1=float((-d).double().sum()),
        approx_kl_k3=float(k3(d.double()).sum()),
        ratio=float(ratio.sum()),
        ratio_sq=float((ratio * ratio).sum()),
        clamped=float((raw.abs() > LOG_RATIO_LIMIT).sum()),
        smallest=float(ratio.min()) if len(ratio) else float("inf"),
        largest=float(ratio.max()) if len(ratio) else float("-inf"),
    )
