"""A model on one rank that is only asked for log-probs: neither trained nor split."""

from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.actor.attention_packed import packed_seq_params
from megarl.actor.model import build_model
from megarl.actor.setup import destroy_parallel, init_parallel
from megarl.actor.state import load_model
from megarl.mesh import Mesh
from megarl.models.spec import ModelSpec

_TIMEOUT_S = 600.0


def whole_model_logprobs(weights: Path, spec: ModelSpec, tokens: Sequence[int]) -> torch.Tensor:
    """f64 [L - 1], of each token but the first after those before it, by the model that Megatron
    builds from the distributed checkpoint ``weights``, computed in float32. Raises DataError where
    it is none of ``spec``.
    """
    parallel = init_parallel(Mesh(), seed=1, timeout_s=_TIMEOUT_S)
    try:
        model = build_model(spec, parallel, torch.float32)
        load_model(model, parallel, weights)
        ids = torch.tensor(tokens, device=parallel.device)
        ends = torch.tensor([0, len(tokens)], dtype=torch.int32, device=parallel.device)
        positions = torch.arange(len(tokens), device=parallel.device)
        with torch.no_grad():
            core = model[0].eval()
            packing = packed_seq_params(ends)
            logits = core(ids[None], positions[None], None, packed_seq_params=packing)
            every = logits[0, :-1, : spec.vocab].double().log_softmax(-1)
            found: torch.Tensor = every.gather(1, ids[1:, None])[:, 0].cpu()
        return found
    finally:
        destroy_parallel()
