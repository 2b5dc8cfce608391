"""Where the memory of a model in training is: on the device, or in host memory while it is idle.

The memory of a tensor goes by resizing its storage to nothing, and comes back in the same storage.
All views of it (parameters in a flat buffer, an optimizer's shards of them) stay the objects that
they are, so nothing that refers to them has to know.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER)


class Evicted:
    """Tensors whose device memory is given back; their contents lie in (pinned) host memory, or are
    forgotten, to come back as zeros.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep: bool) -> None:
        self._storages = list(storages(tensors).values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._host = [_to_host(storage) if keep else None for storage in self._storages]
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        for storage, size, host in zip(self._storages, self._sizes, self._host, strict=True):
            storage.resize_(size)
            memory = _bytes(storage)
            if host is None:
                memory.zero_()
            else:
                memory.copy_(host)


def evict(part: str, model: Sequence[Any], optimizer: Any, device: torch.device) -> Evicted:
    """Free the device memory of one of ``PARTS``. ``model``: chunks in DDP."""
    tensors = _TENSORS[part](model, optimizer)
    found = [t for t in tensors if t.device.type == device.type]
    if part == OPTIMIZER:  # in fp32 its parameters are the model's own
        weights = storages(_weights(model, optimizer)).keys()
        found = [t for t in found if key_of(t) not in weights]
    return Evicted(found, keep=part != GRADIENTS)  # every step begins with gradients of zero


def _weights(model: Sequence[Any], optimizer: Any) -> list[torch.Tensor]:
    return [
        t
        for m in (chunk.module for chunk in model)
        for t in (*(p.data for p in m.parameters()), *m.buffers())
    ]


def _gradients(model: Sequence[Any], optimizer: Any) -> list[torch.Tensor]:
    return [
        buffer.grad_data
        for chunk in model
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def _optimizer(model: Sequence[Any], optimizer: Any) -> list[torch.Tensor]:
    """Main parameters and moments."""
    inner = [
        part.optimizer
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        if part.optimizer is not None  # of a stage in which all is frozen
    ]
    main = [p.data for one in inner for group in one.param_groups for p in group["params"]]
    states = [value for one in inner for entry in one.state.values() for value in entry.values()]
    return [*main, *(value for value in states if isinstance(value, torch.Tensor))]


_TENSORS = {WEIGHTS: _weights, GRADIENTS: _gradients, OPTIMIZER: _optimizer}


def key_of(tensor: torch.Tensor) -> int:
    """The identity of what a tensor and its views share."""
    return int(tensor.untyped_storage()._cdata)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once, in order."""
    return {key_of(t): t.untyped_storage() for t in tensors}


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
    return host.copy_(_bytes(storage))
