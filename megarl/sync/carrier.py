"""How buckets get from one sender to servers, and what has become of the servers meanwhile."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megarl.protocols import WeightSink
from megarl.sync.packing import Packed

Identity = tuple[str, str]  # of a server's process: name, boot


@dataclass
class Outcome:
    """What has become of a push's servers so far. ``lost``: why, by name. ``again``: those that
    need everything anew, through no fault of theirs: they shared a way with one that failed.
    """

    lost: dict[str, str] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)

    def add(self, lost: Mapping[str, str], again: Iterable[str]) -> None:
        self.lost = {**lost, **self.lost}  # the first reason counts
        self.again = (self.again | set(again)) - self.lost.keys()

    def out(self) -> set[str]:
        return self.lost.keys() | self.again


class Carrier(Protocol):
    """One sender's way to servers; every trainer rank has one. Calls block, and end by deadlines.
    A server's failure is told in the outcome; an exception is a failure of the trainer's own.

    ``session``: servers take what comes between the begin and the end of an update. ``keeps``: what
    was sent of a version can be handed over again, by ``finish`` alone, until another is.
    """

    session: bool
    keeps: bool

    def buffer(self, num_bytes: int) -> Tensor | None:
        """Memory, u8 [num_bytes], for buckets to lie in while they are sent; None: they may lie
        anywhere.
        """
        ...

    def open(self, sinks: Sequence[WeightSink], attempt: int) -> Outcome:
        """In every sender, before anything is sent to these servers. ``attempt`` is another number
        whenever everything is sent anew, the same in all senders.
        """
        ...

    def send(self, bucket: Packed, names: set[str]) -> Outcome:
        """One bucket to those of ``names``, all of whom are open; returns when they have it."""
        ...

    def finish(
        self, version: int, digests: Mapping[str, str], sinks: Sequence[WeightSink]
    ) -> Outcome:
        """On rank 0, after all senders have sent everything, of which ``digests`` are. Most have
        nothing left to do.
        """
        ...

    def drop(self, names: Iterable[str]) -> None:
        """These servers are lost."""
        ...

    def close(self) -> None: ...


def identities(sinks: Iterable[WeightSink]) -> tuple[Identity, ...]:
    return tuple((sink.name, sink.boot) for sink in sinks)
