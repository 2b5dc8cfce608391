"""Records the calls of compiled operators, whoever makes them."""

import hashlib
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OpCall(NamedTuple):
    """``digests``: of the bits of every tensor returned, and of those given, which an op in place
    has written to.
    """

    op: str
    arguments: tuple[Any, ...]
    digests: list[str]


class OpRecorder(TorchDispatchMode):
    """While entered, ``calls`` grows by every call of a ``megarl::`` operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpCall] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace != "megarl":
            return function(*args, **(kwargs or {}))
        kept = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)
        result = function(*args, **(kwargs or {}))
        self.calls.append(OpCall(function._opname, kept, digests(result, args)))
        return result


def digests(*values: Any) -> list[str]:
    """sha256 of every tensor's bits, also in tuples and lists."""
    found: list[str] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
            found.append(hashlib.sha256(raw.numpy().tobytes()).hexdigest())
        elif isinstance(value, tuple | list):
            found += digests(*value)
    return found
