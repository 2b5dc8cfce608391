"""What the embedded engine asks of whoever brings its weights (``sync/receiver.py``)."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from megarl.types import TensorSpec


class WeightReceiver(Protocol):
    """How weights come in; each method, or the future that it returns, raises a MegarlError when
    it fails.
    """

    def join_group(
        self,
        *,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        name: str,
        backend: str,
        timeout_s: float | None = None,
    ) -> None: ...

    def leave_group(self, name: str) -> None: ...

    def begin(self) -> None: ...

    def receive(
        self, specs: Sequence[TensorSpec], *, group: str, flattened: bool
    ) -> "Future[None]": ...

    def receive_shared(
        self, specs: Sequence[TensorSpec], place: Mapping[str, Any]
    ) -> "Future[None]": ...

    def end(self) -> None: ...

    def digests(self) -> dict[str, str]: ...

    def held(self) -> dict[str, str]: ...

    @property
    def digest_seconds(self) -> float: ...
