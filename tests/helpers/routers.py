"""What routers do with samples, by transformers, and their metrics by the formulas of
docs/routers.md in float64. Never imported next to Megatron (``families.py`` says why).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.types import Sample


@dataclass
class Routed:
    """Of a layer and n tokens."""

    logits: torch.Tensor  # f64 [n, E]
    loads: torch.Tensor  # i64 [E]


def routed(folder: Path, samples: Sequence[Sample]) -> dict[int, Routed]:
    """By layer, of every token of ``samples``, one sample at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    inputs: dict[int, list[torch.Tensor]] = {}
    chosen: dict[int, list[torch.Tensor]] = {}
    gates = {}

    def keep(where: dict[int, list[torch.Tensor]], layer: int, argument: int) -> Any:
        def hook(module: Any, arguments: tuple[Any, ...]) -> None:
            where.setdefault(layer, []).append(arguments[argument].flatten(0, -2))

        return hook

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            gates[layer] = block.mlp.gate
            block.mlp.gate.register_forward_pre_hook(keep(inputs, layer, 0))
            block.mlp.experts.register_forward_pre_hook(keep(chosen, layer, 1))
    with torch.no_grad():
        for sample in samples:
            model(torch.from_numpy(sample.tokens).long()[None])
    found = {}
    for layer, gate in gates.items():
        experts = len(gate.weight)
        logits = torch.cat(inputs[layer]).double() @ gate.weight.detach().double().T
        loads = torch.bincount(torch.cat(chosen[layer]).flatten(), minlength=experts)
        found[layer] = Routed(logits, loads)
    return found


def expected_metrics(layers: Mapping[int, Routed], topk: int, *, sigmoid: bool) -> dict[str, float]:
    violations, least, idle, entropy, squares, missing = [], [], [], [], [], []
    for layer in layers.values():
        tokens, experts = layer.logits.shape
        loads = layer.loads.tolist()
        mean = sum(loads) / experts
        violations.append(max(loads) / mean - 1)
        least.append(min(loads) / mean)
        idle.append(sum(load == 0 for load in loads) / experts)
        missing.append(1 - sum(loads) / (tokens * topk))
        scores = layer.logits.sigmoid() if sigmoid else layer.logits.exp()
        p = scores / scores.sum(1, keepdim=True)
        entropy.append(float(-(p * p.log()).sum(1).mean()))
        squares.append(float(layer.logits.exp().sum(1).log().square().mean()))
    values = {
        "load_max_violation": violations,
        "load_min_share": least,
        "idle_experts": idle,
        "dropped": missing,
        "router_entropy": entropy,
        "router_z": squares,
    }
    metrics = {f"moe/{name}": math.fsum(of) / len(of) for name, of in values.items()}
    worst = {"load_max_violation_worst": max(violations), "load_min_share_worst": min(least)}
    return metrics | {f"moe/{name}": value for name, value in worst.items()}
