"""Whether the tensors of a Hugging Face folder are exactly the model that its config.json says."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.models.hf_fused import fused_name
from megarl.models.hf_headers import fault_list
from megarl.models.hf_io import HfCheckpoint, inspect_folder
from megarl.models.mapping import ModelMapping, mapping_for
from megarl.models.spec import ModelSpec

_COMPARED_AT_ONCE = 2**22  # elements


def open_model(
    hf_dir: Path,
    spec: ModelSpec,
    *,
    allow_missing: Collection[str] = (),
    extra: Collection[str] = (),
) -> HfCheckpoint:
    """The folder, if it is whole and the model of ``spec``; by headers alone.

    ``allow_missing``: tensors that the model has and the folder lacks, by name: they are zeros in
    what is made of it. ``extra``: tensors
    that are not looked at, whether there or not. Raises one DataError with every fault of the
    files, of FP8 in them and of what they hold.
    """
    checkpoint, faults = inspect_folder(hf_dir)
    faults += _tensor_faults(checkpoint, spec, mapping_for(spec), allow_missing, extra)
    if faults:
        raise fault_list(checkpoint.folder, faults)
    checkpoint.missing = frozenset(allow_missing)
    return checkpoint


def check_complete(
    checkpoint: HfCheckpoint,
    spec: ModelSpec,
    extra: Collection[str] = (),
    *,
    allow_missing: Collection[str] = (),
) -> None:
    """Refuse a checkpoint that is not exactly the model of ``spec``: every fault in one DataError.

    Tied embeddings: published checkpoints often store ``lm_head.weight`` all the same. It is
    accepted where it equals the embedding bit for bit, and is not written back. Copies that
    multi-token prediction layers have of the embedding and the head may be there or not; they are
    compared likewise, a part at a time. ``extra`` and ``allow_missing``: as in ``open_model``.
    """
    mapping = mapping_for(spec)
    faults = _tensor_faults(checkpoint, spec, mapping, allow_missing, extra)
    if not faults:
        found = set(checkpoint.names()) - set(extra)
        faults = [
            f"{because}, but {name} differs from {source}"
            for name, (source, because) in sorted(_repeats(mapping, spec).items())
            if {name, source} <= found and not equal_tensors(checkpoint, name, source)
        ]
    if faults:
        raise fault_list(checkpoint.folder, faults)


def equal_tensors(checkpoint: HfCheckpoint, name: str, other: str) -> bool:
    """Bit for bit but for NaN, which equals nothing; a part at a time."""
    rows, columns = checkpoint.shape(name)
    step = max(1, _COMPARED_AT_ONCE // columns)
    return all(
        torch.equal(checkpoint.get(name, rows=part), checkpoint.get(other, rows=part))
        for part in ((row, min(row + step, rows)) for row in range(0, rows, step))
    )


def _tensor_faults(
    checkpoint: HfCheckpoint,
    spec: ModelSpec,
    mapping: ModelMapping,
    allow_missing: Collection[str],
    extra: Collection[str],
) -> list[str]:
    """``checkpoint.unread`` tensors are there, but nothing can be said about them."""
    repeats = _repeats(mapping, spec)
    needed = {t.name: t.shape for t in mapping.hf_spec()}
    expected = {n: shape for n, shape in needed.items() if n not in {*repeats, *extra}}
    shapes = expected | {n: needed.get(n, needed.get(of)) for n, (of, _) in repeats.items()}
    found = set(checkpoint.names()) - set(extra)
    there = found | checkpoint.unread
    faults = _allowed_faults(set(allow_missing), set(expected), there)
    faults += [
        f"{of} may be missing, but {name}, which repeats it, is there: rename that one"
        for name, (of, _) in sorted(repeats.items())
        if of in set(allow_missing) - there and name in there
    ]
    faults += _without_mtp(there, expected, spec)
    missing = set(expected) - there - set(allow_missing)
    missing -= {n for n in missing if fused_name(n) in checkpoint.unread}
    faults += [f"missing {name} {list(expected[name])}" for name in sorted(missing)]
    faults += [f"not part of the model: {name}" for name in sorted(found - set(shapes))]
    for name in sorted(found & set(shapes)):
        shape = checkpoint.shape(name)
        if shape != shapes[name]:
            implied = f"config.json implies {list(shapes[name] or ())}"
            faults.append(f"{name}: found {list(shape)}; {implied}")
    return faults


def _allowed_faults(allowed: set[str], expected: set[str], there: set[str]) -> list[str]:
    unknown = [f"{n} may be missing, but the model has none" for n in sorted(allowed - expected)]
    return unknown + [
        f"{n} may be missing, but is there" for n in sorted(allowed & expected & there)
    ]


def _repeats(mapping: ModelMapping, spec: ModelSpec) -> dict[str, tuple[str, str]]:
    """{tensor that files may hold once more: (of which, why)}."""
    because = "multi-token prediction layers share it"
    repeats = {name: (source, because) for name, source in mapping.copies().items()}
    if spec.tie_embeddings:
        tied = "tie_word_embeddings is true"
        repeats["lm_head.weight"] = ("model.embed_tokens.weight", tied)
    return repeats


def _without_mtp(there: set[str], expected: Mapping[str, Any], spec: ModelSpec) -> list[str]:
    """What to do about a model that was saved without its multi-token prediction layers."""
    layers = range(spec.layers, spec.layers + spec.mtp_layers)
    names = {n for n in expected for layer in layers if n.startswith(f"model.layers.{layer}.")}
    if not names or names & there:
        return []
    announced = f"num_nextn_predict_layers={spec.mtp_layers}"
    return [f"no multi-token prediction layer is there: config.json's {announced} should be 0"]
