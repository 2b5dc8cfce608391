"""What routers do with the tokens of an optimizer step, as metrics. docs/routers.md has what is
healthy.

1. Only true tokens of passes that make gradients count, each once: on the rank that routes it, in
   every layer. Log-prob passes and padding do not; of a layer that is computed again in the
   backward pass the second time counts.
2. Loads are of the experts that tokens really went to. They are integers, summed over the ranks of
   a pipeline stage: the same in every layout.
3. Nothing waits for the device before the end of a step: one reduction then, of all layers.

With load_e the tokens of expert e in a layer, n tokens that each choose k of E experts, and
p_e = score_e / sum of scores (softmax: the scores are probabilities)::

    load_max_violation = max_e load_e / mean load - 1      (MaxVio of arXiv:2408.15664)
    load_min_share     = min_e load_e / mean load
    idle_experts       = share of experts with load 0
    dropped            = 1 - sum_e load_e / (n k)
    router_entropy     = mean over tokens of - sum_e p_e log p_e
    router_z           = mean over tokens of (log sum_e exp z_e)^2
    aux_loss           = mean over rows of E sum_e f_e P_e, where moe.aux_loss_coeff is set
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.setup import Parallel
from megarl.types import Max, Mean, Metric, Min, StepMetrics

_SUMS = 4  # true tokens, and over them entropy and square of log-sum-exp; the balancing loss


class RouterRecord:
    """Sums of one router since ``forget``, on this rank. Plain tensors: neither weights nor state.

    ``loads`` i64 [E]; ``sums`` f64 [4]. ``aux``, of these the last: this rank's part of the rows'
    balancing losses without their coefficient.
    """

    def __init__(self, num_experts: int, device: Any) -> None:
        self.loads = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.sums = torch.zeros(_SUMS, dtype=torch.float64, device=device)
        self.aux = self.sums[-1]

    def forget(self) -> None:
        self.loads.zero_()
        self.sums.zero_()

    @torch.no_grad()
    def add(
        self,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        padding: torch.Tensor | None,
        score_function: str,
    ) -> None:
        """A microbatch's ``logits`` [T, E]; ``chosen`` bool [T, E]; ``padding`` bool [T], True
        there.
        """
        true = torch.ones_like(chosen[:, 0]) if padding is None else ~padding
        self.loads += (chosen & true[:, None]).sum(0)
        logits = logits.float()
        scores = logits.softmax(-1) if score_function == "softmax" else logits.sigmoid()
        entropy = torch.special.entr(scores / scores.sum(-1, keepdim=True)).sum(-1)
        squares = logits.logsumexp(-1).square()
        of_tokens = torch.stack([torch.ones_like(entropy), entropy, squares]).double()
        self.sums[:3] += of_tokens.masked_fill(~true, 0.0).sum(-1)

    def packed(self) -> torch.Tensor:
        """f64 [4 + E]: counts are exact up to 2^53."""
        return torch.cat([self.sums, self.loads.double()])


def router_metrics(
    records: Mapping[int, RouterRecord],
    parallel: Parallel,
    *,
    topk: int,
    rows: int,
    aux_loss: bool,
    by_layer: bool,
) -> StepMetrics:
    """Of an optimizer step. ``records``: by layer of the model, from 0, those of this stage;
    ``rows``: of a data-parallel rank. One rank of the stage has the metrics, the others none.
    Collective over the stage.
    """
    if not records:
        return []
    packed = torch.stack([record.packed() for record in records.values()])
    dist.all_reduce(packed, group=parallel.stage)
    if (parallel.at.tp, parallel.at.cp, parallel.at.dp) != (0, 0, 0):
        return []
    found: StepMetrics = []
    for layer, numbers in zip(records, packed.cpu().unbind(), strict=True):
        of_layer = list(_of_layer(numbers[:_SUMS].tolist(), numbers[_SUMS:], topk))
        if aux_loss:
            total = float(numbers[_SUMS - 1])
            of_layer.append(Metric("moe/aux_loss", Mean(total, rows * parallel.mesh.dp)))
        found += of_layer
        if by_layer:
            named = {m.name: m.value for m in of_layer}
            for name in ("load_max_violation", "router_entropy"):
                found.append(Metric(f"moe/layer_{layer:03d}/{name}", named[f"moe/{name}"]))
    return found


def _of_layer(sums: list[float], loads: torch.Tensor, topk: int) -> Iterator[Metric]:
    """``loads`` f64 [E]. Of a layer without a token: means of nothing."""
    tokens, entropy, squares, _ = sums
    total, experts = float(loads.sum()), len(loads)
    seen = float(total > 0)
    mean = total / experts if total else 1.0
    violation = float(loads.max()) / mean - seen
    least = float(loads.min()) / mean
    yield Metric("moe/load_max_violation", Mean(violation, seen))
    yield Metric("moe/load_min_share", Mean(least, seen))
    if seen:
        yield Metric("moe/load_max_violation_worst", Max(violation))
        yield Metric("moe/load_min_share_worst", Min(least))
    yield Metric("moe/idle_experts", Mean(seen * float((loads == 0).sum()), seen * experts))
    yield Metric("moe/dropped", Mean(tokens * topk - total, tokens * topk))
    yield Metric("moe/router_entropy", Mean(entropy, tokens))
    yield Metric("moe/router_z", Mean(squares, tokens))
