"""Memory that the embedded server gives back and takes again, as SGLang's memory saver does.

Tensors stay what they are, views of them too; the memory behind them is gone meanwhile, and they
must not be touched. What is taken again holds anything.
"""

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from megarl.errors import ServerError

KV_CACHE, WEIGHTS = "kv_cache", "weights"
MEMORY = (KV_CACHE, WEIGHTS)  # SGLang's names


class Released(ServerError):
    """Something needs memory that was given back."""


class Memory:
    """``released``: the parts of ``MEMORY`` that are given back."""

    def __init__(self) -> None:
        self.released: frozenset[str] = frozenset()
        self._given: list[tuple[torch.UntypedStorage, int]] = []  # and bytes

    def release(self, tag: str, tensors: Iterable[Tensor] = ()) -> None:
        """``tensors``: all that have this memory, and are to keep their shapes."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        for storage in storages.values():
            self._given.append((storage, storage.nbytes()))
            storage.resize_(0)
        self.released |= {tag}
        _give_back()

    def restore(self, tags: frozenset[str]) -> None:
        """Raises Released for a part that is not, RuntimeError where memory is short."""
        if more := sorted(tags - self.released):
            raise Released(f"tags: found {', '.join(more)}; released: {sorted(self.released)}")
        while WEIGHTS in tags and self._given:
            storage, num_bytes = self._given[-1]
            storage.resize_(num_bytes)
            self._given.pop()
        self.released -= tags

    def require(self, *tags: str) -> None:
        """Raises Released where one of them is."""
        if lacks := sorted(self.released & set(tags)):
            raise Released(f"memory of {' and '.join(lacks)} was released; resume it first")


def _give_back() -> None:
    """What is free goes from the allocators to where others can have it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def own_memory(module: torch.nn.Module) -> None:
    """Parameters that lie in a mapped file get memory that can be given back."""
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
