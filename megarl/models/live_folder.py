"""Weights of a Hugging Face folder into a server that runs, as it holds them.

What the server has in FP8 blocks must be so in the folder, and what it has not must not: codes of
values and values of codes would be other weights than those that were published. Plain tensors take
the server's dtype.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

from megarl.models.hf_fp8 import SCALE
from megarl.models.hf_headers import fault_list
from megarl.models.hf_io import HfCheckpoint, open_checkpoint
from megarl.models.live_weights import LiveWeights

log = logging.getLogger(__name__)


def open_weights(folder: Path, weights: LiveWeights) -> HfCheckpoint:
    """The folder, if it can be loaded into ``weights``; by headers alone.

    Raises one DataError with every fault of its files and every tensor that is missing or does not
    fit.
    """
    source = open_checkpoint(folder)
    faults = list(_faults(source, weights))
    if faults:
        raise fault_list(folder, faults)
    extra = [n for n in source.names() if n not in weights.held and not weights.is_behind(n)]
    if extra:
        log.warning("%s: not used: %s", folder, sorted(extra)[:3])
    return source


def load_weights(source: HfCheckpoint, weights: LiveWeights) -> None:
    """Everything that ``open_weights`` has looked at, as one update. Raises DataError where a file
    has changed since: then the weights are half old, half new.
    """
    weights.begin()
    for name in source.names():
        scaled = name in source.codes
        for part in (name, name + SCALE) if scaled else (name,):
            if part in weights.held:
                weights.write(part, source.stored(part).to(weights.held[part].dtype))
            elif weights.is_behind(part):
                tensor = source.stored(part)
                weights.write(part, tensor.float() if part != name else tensor)
    weights.end()


def _faults(source: HfCheckpoint, weights: LiveWeights) -> Iterator[str]:
    there = set(source.names())
    for name, tensor in weights.held.items():
        weight = name.removesuffix(SCALE)
        if weight != name and weight in weights.codes:
            continue  # comes with its codes
        shape = tuple(tensor.shape)
        if name not in there:
            yield f"missing {name} {list(shape)}"
            continue
        if source.shape(name) != shape:
            yield f"{name}: found {list(source.shape(name))}; the server's is {list(shape)}"
        found, wanted = name in source.codes, name in weights.codes
        if found != wanted:
            yield f"{name}: found {_kind(found)}; the server has it {_kind(wanted)}"
    if weights.blocks and source.blocks and source.blocks.block != weights.blocks.block:
        blocks = [list(x.block) for x in (source.blocks, weights.blocks)]
        yield f"blocks of FP8: found {blocks[0]}; the server's are {blocks[1]}"


def _kind(in_codes: bool) -> str:
    return "in FP8 blocks" if in_codes else "plain"
