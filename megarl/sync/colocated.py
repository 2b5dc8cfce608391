"""Buckets to servers on this machine: they stay where they are packed, and servers are told where.

How a server is told depends on what it can read (``Handover``): the embedded server maps shared
memory (``shared_memory.py``), SGLang takes handles of tensors (``tensor_handles.py``). A server has
read a bucket when it answers; until then nothing else is packed there. One that does not answer in
time may still be reading, and gets torn bytes then: it is lost, and samples nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, Protocol

from torch import Tensor

from megarl.protocols import WeightSink
from megarl.sync.asking import ask, failed, refusals
from megarl.sync.carrier import Outcome
from megarl.sync.packing import Packed


class Handover(Protocol):
    """How servers find a bucket."""

    op: str  # of ``WeightSink.control``

    def buffer(self, num_bytes: int) -> Tensor:
        """u8 [num_bytes] that servers can be told of."""
        ...

    def refuse(self, sink: WeightSink) -> str:
        """Why a server cannot read it, as far as one can say beforehand; empty if it can."""
        ...

    def message(self, bucket: Packed, sink: WeightSink) -> Mapping[str, Any]:
        """JSON; ``bucket.flat`` is the beginning of one of the buffers."""
        ...

    def failed(self, sink: WeightSink) -> None:
        """It did not take what the last message told of, or nobody knows whether it did."""
        ...


class Colocated:
    """A ``Carrier``."""

    session = True
    keeps = False

    def __init__(self, handover: Handover, timeout_s: float) -> None:
        self._handover, self._timeout_s = handover, timeout_s
        self._sinks: dict[str, WeightSink] = {}

    def buffer(self, num_bytes: int) -> Tensor:
        return self._handover.buffer(num_bytes)

    def open(self, sinks: Sequence[WeightSink], attempt: int) -> Outcome:
        refused = {sink.name: self._handover.refuse(sink) for sink in sinks}
        self._sinks = {sink.name: sink for sink in sinks if not refused[sink.name]}
        return Outcome(lost={name: why for name, why in refused.items() if why})

    def send(self, bucket: Packed, names: set[str]) -> Outcome:
        sinks = [sink for name, sink in self._sinks.items() if name in names]
        told = [self._handover.message(bucket, sink) for sink in sinks]
        replies = [
            ask(sink, self._handover.op, message, self._timeout_s)
            for sink, message in zip(sinks, told, strict=True)
        ]
        wait(replies)
        for sink, reply in zip(sinks, replies, strict=True):
            if failed(reply):
                self._handover.failed(sink)
        return Outcome(lost=refusals(sinks, replies))

    def finish(
        self, version: int, digests: Mapping[str, str], sinks: Sequence[WeightSink]
    ) -> Outcome:
        """They have everything already."""
        return Outcome()

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._sinks.pop(name, None)

    def close(self) -> None:
        self._sinks.clear()
