"""What transformers computes where every token is sent to experts that somebody else chose.

Every family's router of transformers asks ``torch.topk`` for the experts of its scores and goes on
from the ids it gets, by the family's own rule for gate weights. Here ``torch.topk`` gives it the
ids that are wanted, with the live scores at them. Never imported next to Megatron.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.models.live_weights import hf_parameters
from megarl.types import Sample
from tests.helpers.families import _load, _logprobs, token_weights

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def shape_of(folder: Path) -> tuple[int, int, int]:
    """(MoE layers, experts a token, experts) of a model of ``families.MODELS``."""
    config = json.loads((folder / "config.json").read_text())
    experts = next(config[key] for key in _EXPERTS if config.get(key))
    dense = config.get("first_k_dense_replace", 0) + len(config.get("mlp_only_layers", []))
    return config["num_hidden_layers"] - dense, config["num_experts_per_tok"], experts


def with_random_routing(
    samples: Sequence[Sample], shape: tuple[int, int, int], seed: int = 0
) -> list[Sample]:
    """Experts that no router would choose, K different ones for every token but the last."""
    layers, topk, experts = shape
    dtype = np.uint8 if experts <= 256 else np.uint16
    rng = np.random.default_rng(seed)
    every = np.arange(experts, dtype=dtype)
    return [
        replace(
            s,
            routing=rng.permuted(np.tile(every, (s.length - 1, layers, 1)), axis=-1)[..., :topk],
        )
        for s in samples
    ]


def live_routing(folder: Path, samples: Sequence[Sample]) -> list[NDArray[Any]]:
    """i64 [L, M, K] of every sample: what the model's own routers choose."""
    return forced_choices(folder, [replace(s, routing=None) for s in samples])


def forced_choices(folder: Path, samples: Sequence[Sample]) -> list[NDArray[Any]]:
    """i64 [L, M, K] of every sample: its routing, and for the last token what the routers choose
    when the tokens before went there.
    """
    shape, model = shape_of(folder), _load(folder)
    found = []
    for sample in samples:
        chosen: list[torch.Tensor] = []
        with torch.no_grad(), _topk_of(shape, chosen, sample.routing):
            _logprobs(model, sample)
        found.append(torch.stack(chosen, 1).numpy())
    return found


def forced_logprobs(folder: Path, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """``families.reference_logprobs`` with the samples' routing."""
    shape, model = shape_of(folder), _load(folder)
    found = []
    for sample in samples:
        with torch.no_grad(), _topk_of(shape, [], sample.routing):
            found.append(_logprobs(model, sample))
    return found


def forced_gradients(folder: Path, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """``families.reference_gradients`` with the samples' routing."""
    shape, model = shape_of(folder), _load(folder)
    for sample in samples:
        weights = torch.from_numpy(token_weights(sample.tokens.tolist()) * sample.mask)
        with _topk_of(shape, [], sample.routing):
            (_logprobs(model, sample) * weights[1:]).sum().backward()
    for parameter in model.parameters():
        unused = torch.zeros_like(parameter)
        parameter.data = unused if parameter.grad is None else parameter.grad
    return {n: t for n, t in hf_parameters(model).items() if "e_score_correction_bias" not in n}


@contextmanager
def _topk_of(
    shape: tuple[int, int, int], chosen: list[torch.Tensor], wanted: NDArray[Any] | None
) -> Iterator[None]:
    """``wanted`` [tokens, M, K], of the first tokens; the others are the router's own. ``chosen``
    gets what every MoE layer has in the end.
    """
    layers, topk, experts = shape
    own = torch.topk

    def forced(scores: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        values, ids = own(scores, k, dim=dim, **options)
        if k != topk or scores.shape[-1] != experts:  # of groups
            return values, ids
        if wanted is not None:
            mine = torch.from_numpy(wanted[:, len(chosen)].astype(np.int64))
            ids = torch.cat([mine, ids[len(mine) :]])
        chosen.append(ids)
        return scores.gather(-1, ids), ids

    with mock.patch.object(torch, "topk", forced):
        yield
    assert len(chosen) == layers, (len(chosen), layers)
