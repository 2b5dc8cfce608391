"""Whether the tensors of a Hugging Face folder are exactly the model that its config.json says."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from megarl.errors import DataError
from megarl.models.hf_io import HfCheckpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import ModelSpec


def check_complete(checkpoint: HfCheckpoint, spec: ModelSpec, extra: Collection[str] = ()) -> None:
    """Refuse a checkpoint that is not exactly the model of ``spec``: every fault in one DataError.

    Tied embeddings: published checkpoints often store ``lm_head.weight`` all the same. It is
    accepted where it equals the embedding bit for bit, and is not written back. Copies that
    multi-token prediction layers have of the embedding and the head may be there or not. ``extra``:
    tensors that are not looked at, whether there or not.
    """
    mapping = mapping_for(spec)
    copies = mapping.copies()
    expected = {t.name: t.shape for t in mapping.hf_spec() if t.name not in {*copies, *extra}}
    found = set(checkpoint.names()) - set(extra)
    because = "multi-token prediction layers share it"
    repeats = {name: (source, because) for name, source in copies.items()}
    if spec.tie_embeddings:
        tied = "tie_word_embeddings is true"
        repeats["lm_head.weight"] = ("model.embed_tokens.weight", tied)
    for name in sorted(found & set(repeats)):
        source, because = repeats[name]
        if source in found and not torch.equal(checkpoint.get(name), checkpoint.get(source)):
            fault = f"{because}, but {name} differs from {source}"
            raise DataError(f"{checkpoint.folder}: {fault}")
        found.discard(name)
    faults = _without_mtp(found, expected, spec)
    faults += [f"missing {name} {list(expected[name])}" for name in sorted(set(expected) - found)]
    faults += [f"not part of the model: {name}" for name in sorted(found - set(expected))]
    for name in sorted(found & set(expected)):
        shape = checkpoint.shape(name)
        if shape != expected[name]:
            implied = f"config.json implies {list(expected[name])}"
            faults.append(f"{name}: found {list(shape)}; {implied}")
    if faults:
        shown = [*faults[:20], f"and {len(faults) - 20} more"] if len(faults) > 20 else faults
        title = f"{checkpoint.folder}: tensors and config.json do not fit ({len(faults)} faults)"
        raise DataError("\n  ".join([title, *shown]))


def _without_mtp(found: set[str], expected: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    """What to do about a model that was saved without its multi-token prediction layers."""
    layers = range(spec.layers, spec.layers + spec.mtp_layers)
    names = {n for n in expected for layer in layers if n.startswith(f"model.layers.{layer}.")}
    if not names or names & found:
        return []
    announced = f"num_nextn_predict_layers={spec.mtp_layers}"
    return [f"no multi-token prediction layer is there: config.json's {announced} should be 0"]
