"""The reference policy: another set of weights for the actor's own model, kept in host memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HostWeights:
    """A copy of the parameters and buffers of a model's chunks as they are now. Frozen parameters
    are left out: they stay what they are. (An optimizer's main parameters are no part of it.)
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        with torch.no_grad():
            self._copy = [_to_host(t) for t in _tensors(chunks)]

    @contextmanager
    def loaded(self, chunks: list[torch.nn.Module]) -> Iterator[None]:
        """Inside, the model has these weights; afterwards its own again, bit for bit."""
        own = HostWeights(chunks)
        self.put(chunks)
        try:
            yield
        finally:
            own.put(chunks)

    @torch.no_grad()  # a parameter that is kept in FP8 has itself as its data
    def put(self, chunks: list[torch.nn.Module]) -> None:
        """Give the model these weights."""
        for tensor, value in zip(_tensors(chunks), self._copy, strict=True):
            tensor.copy_(value, non_blocking=True)


def _tensors(chunks: list[torch.nn.Module]) -> list[torch.Tensor]:
    return [
        tensor
        for chunk in chunks
        for tensor in (*(p.data for p in chunk.parameters() if p.requires_grad), *chunk.buffers())
    ]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)
