"""How much memory torch's operations of this thread have allocated at most at one time."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocated(TorchDispatchMode):
    """``peak``: bytes of storages that were made inside and lived together."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = {_storage(t)._cdata for t in tree_leaves((args, kwargs)) if _has(t)}
        for tensor in tree_leaves(found):
            if _has(tensor) and (storage := _storage(tensor))._cdata not in known:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return found


def _has(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
