"""One sender's part of a push: gather, form, pack, and send the bucket before meanwhile."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from megarl.protocols import Bucket
from megarl.sync.asking import in_background
from megarl.sync.carrier import Carrier, Outcome
from megarl.sync.packing import Packed, Packer
from megarl.sync.stream import Piece

Form = Callable[[Iterable[tuple[str, Tensor]]], Iterator[Bucket]]
Encode = Callable[[Iterable[Bucket]], Iterator[list[Piece]]]


@dataclass
class Sent:
    """``digests`` by name; ``calls``: buckets; ``digest_seconds``: this end's."""

    digests: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    calls: int = 0
    digest_seconds: float = 0.0
    outcome: Outcome = field(default_factory=Outcome)
    error: Exception | None = None


def send_all(
    tensors: Iterator[tuple[str, Tensor]],
    form: Form,
    encode: Encode,
    packer: Packer,
    carrier: Carrier,
    names: set[str],
) -> Sent:
    """Everything to the servers ``names``. Collective over the stage: the tensors are iterated to
    their end whatever fails, since other ranks wait in their gathers. Never raises; what failed is
    in ``Sent.error``.
    """
    sent, before = Sent(), packer.digest_seconds
    way = _Way(carrier, names, sent.outcome)
    try:
        for bucket in packer.pack(encode(form(tensors))):
            sent.digests |= bucket.digests
            sent.num_bytes += bucket.flat.numel()
            sent.calls += way.send(bucket)
        way.settle()
    except Exception as e:
        sent.error = e
        way.abandon()
        deque(tensors, maxlen=0)
    sent.digest_seconds = packer.digest_seconds - before
    return sent


class _Way:
    """To the servers that are left; one bucket is under way at a time."""

    def __init__(self, carrier: Carrier, names: set[str], outcome: Outcome) -> None:
        self._carrier, self._names, self._outcome = carrier, names, outcome
        self._pending: Future[Outcome] | None = None

    def send(self, bucket: Packed) -> int:
        """Once the bucket before has arrived; how many were sent. Raises what that one's sending
        raised.
        """
        self.settle()
        left = self._names - self._outcome.out()
        if not left:
            return 0
        self._pending = in_background(self._carrier.send, bucket, left)
        return 1

    def settle(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            found = pending.result()
            self._outcome.add(found.lost, found.again)

    def abandon(self) -> None:
        """The bucket under way ends by the carrier's deadline; what becomes of it is no news."""
        if self._pending is not None:
            self._pending.exception()
            self._pending = None
