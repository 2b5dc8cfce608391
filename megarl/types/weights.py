"""Weights on their way to servers."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Delta:
    """A tensor that travels as what changed of another: ``num_bytes`` of payload, and the digest of
    that other one, which the receiver has to hold (docs/weight-delta.md).
    """

    num_bytes: int
    base: str


@dataclass(frozen=True)
class TensorSpec:
    """A tensor under its Hugging Face name; ``dtype`` like ``"bfloat16"``. ``delta``: None where
    its own bytes travel.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    delta: Delta | None = None


@dataclass(frozen=True)
class SyncReceipt:
    """Proof of one weight push: what the trainer sent and every server confirmed before it sampled
    again. ``num_bytes``: sent to each. ``calls``: buckets announced to a server. ``stall_seconds``:
    from the servers' pause until they go on. ``verify_seconds``: what digests took on one end (on a
    CPU with the copies that are made in the same pass) and their comparison together, though some
    of that was beside the sending. Proofs and further attempts count in all but ``num_bytes``.
    """

    version: int
    tensors: int
    num_bytes: int
    seconds: float
    digest: str
    calls: int = 0
    stall_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass(frozen=True)
class Push:
    """What became of a push. ``receipt`` is on rank 0, and None where no server was left; ``lost``,
    on every rank: why, by name, of servers that did not get everything. They sample nothing.
    """

    receipt: SyncReceipt | None
    lost: Mapping[str, str] = field(default_factory=dict)
