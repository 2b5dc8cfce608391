"""That a push writes everything it should, all over it: once for every server process.

1. `remember`: a digest of every parameter that the last update wrote, as it is now. One that it did
   not write (`unwritten`), on no tensor-parallel rank, is an error: nobody would notice that it is
   stale. On some rank it may be nothing but padding.
2. Then their bytes are spoiled: every element whose bits are not all zero has all of them inverted.
   Zeros stay as they are, for padding that a loader never writes must stay zero.
3. The same push again.
4. `compare`: every digest must be what it was.

So an element that no push writes passes where it is zero: nothing tells it from padding, neither
here nor, after what SGLang does to weights behind a load, by its place. One that no push writes and
that is not zero does not pass, nor does a parameter of which nothing is written.

Both ends of it see parameters as they are served: what SGLang does to them behind a load (packing,
transposing, requantising) is part of what is proven to repeat.
"""

from collections.abc import Iterable

import torch

from .digests import tensor_digest
from .lineage import state

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 26  # elements that are spoiled at a time


@torch.no_grad()
def remember(model: torch.nn.Module, written: Iterable[str]) -> dict[str, str]:
    """Digests by parameter, which are spoiled then."""
    known = set(written)
    held = {name: tensor for name, tensor in state(model).items() if name in known}
    digests = {name: tensor_digest(tensor) for name, tensor in held.items()}
    for tensor in held.values():
        spoil(tensor)
    return digests


@torch.no_grad()
def compare(model: torch.nn.Module, remembered: dict[str, str]) -> None:
    """Raises RuntimeError naming parameters that are not what they were."""
    held = state(model)
    wrong = [
        name
        for name, digest in remembered.items()
        if name not in held or tensor_digest(held[name]) != digest
    ]
    if wrong:
        raise RuntimeError(
            f"the same push again left {len(wrong)} of {len(remembered)} parameters other than the "
            f"first one did: {wrong[:5]}; the server serves garbage now and has to be restarted"
        )


def unwritten(model: torch.nn.Module, written: Iterable[str]) -> list[str]:
    """Parameters that are not among them, though a checkpoint has such ones: SGLang marks those
    that it has not, constant scales of keys and values.
    """
    known = set(written)
    return [
        name
        for name, parameter in model.named_parameters()
        if name not in known
        and parameter.numel()
        and not getattr(parameter, "_skip_weight_check", False)
    ]


def spoil(tensor: torch.Tensor) -> None:
    """In place, whatever its strides."""
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    rows = max(1, _CHUNK // max(1, bits[:1].numel())) if bits.dim() else 1
    for part in bits.split(rows) if bits.dim() else (bits,):
        part.copy_(torch.where(part != 0, ~part, part))
