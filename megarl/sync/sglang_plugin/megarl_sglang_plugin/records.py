"""What a model was given in a weight update, and what became of it."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from .digests import finish, partial
from .envelope import is_sealed, unseal
from .lineage import Watch, unseen
from .shadow import Shadow

NamedTensors = Iterable[tuple[str, torch.Tensor]]
Specs = list[tuple[str, torch.dtype, tuple[int, ...]]]

# Digested ahead of the model's reading: a GPU is waited for once in so many tensors or bytes.
_AHEAD, _BYTES_AHEAD = 32, 2**28
_UNSET: Any = object()


class Record:
    """Of one model: its update in progress, or its last one. All is empty if `digests` is None:
    there was no update yet, or the last one failed. `shadow`: for buckets of changes.
    """

    def __init__(self, shadow: Shadow | None = None) -> None:
        self._shadow = Shadow() if shadow is None else shadow
        self.digests: dict[str, str] | None = None  # of what the model took, by name, as it came
        self.failed = False  # the last update did: nobody knows what the model is now
        self.taken: set[str] = set()  # names of which bytes were written into the model
        self.written: set[str] = set()  # what they were written to, under the model's names
        self.seconds = 0.0  # of digesting
        self._seen: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        self._used: set[str] = set()  # of `_seen`, since the last begin
        self._model: torch.nn.Module | None = None
        self._hidden: Any = _UNSET

    @property
    def open(self) -> bool:
        return self._model is not None

    def begin(self, model: torch.nn.Module) -> None:
        """From now on every load goes through `_load`. What there was is forgotten."""
        self.end()
        self._shadow.begin()
        self.digests, self.seconds, self.failed = {}, 0.0, False
        self.taken, self.written = set(), set()
        self._seen, self._used = {key: self._seen[key] for key in self._used}, set()
        load_weights: Callable[..., Any] = model.load_weights  # type: ignore[assignment]

        def load_recorded(weights: NamedTensors, *args: Any, **options: Any) -> Any:
            return self._load(model, load_weights, weights, *args, **options)

        self._model, self._hidden = model, model.__dict__.get("load_weights", _UNSET)
        model.load_weights = load_recorded  # type: ignore[assignment]  # hides the class's own

    def end(self) -> None:
        """What there is stays until the next `begin`."""
        if self._model is None:
            return
        del self._model.load_weights
        if self._hidden is not _UNSET:
            self._model.load_weights = self._hidden
        self._model, self._hidden = None, _UNSET
        self._shadow.end()

    def fail(self) -> None:
        """Nobody knows what the model is now."""
        self.end()
        self.digests, self.failed = None, True

    def _load(
        self,
        model: torch.nn.Module,
        load_weights: Callable[..., Any],
        weights: NamedTensors,
        *args: Any,
        **options: Any,
    ) -> Any:
        """A loader's way with a name hangs on names, shapes and dtypes, never on values: a load of
        the same ones in the same order is watched once, and then known for as long as every update
        has it.
        """
        key, given, note = self._given(weights)
        if key is None or key not in self._seen:
            watch = Watch(model)
            recorded = self._recorded(given, note, watch.give)
            result = watching(watch, load_weights, recorded, *args, **options)
            seen = frozenset(watch.taken), frozenset(watch.written)
            if key is not None:
                self._seen[key] = seen
        else:
            seen = self._seen[key]
            result = load_weights(self._recorded(given, note), *args, **options)
        if key is not None:
            self._used.add(key)
        self.taken |= seen[0]
        self.written |= seen[1]
        return result

    def _given(
        self, weights: NamedTensors
    ) -> tuple[str | None, NamedTensors, Callable[[str, str], None]]:
        """(What the load is known by, its tensors, who is told of each with its digest). Raises
        DeltaError for changes that cannot be made.
        """
        if is_sealed(weights):
            assert isinstance(weights, list | tuple)
            envelope = unseal(weights)
            specs = [(entry.name, entry.dtype, entry.shape) for entry in envelope.entries]
            return _key(specs), self._shadow.receive(envelope, self), self._shadow.note
        key = None
        if isinstance(weights, list | tuple):
            key = _key([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights])
        return key, weights, lambda name, digest: self._shadow.void(name)

    def _recorded(
        self,
        weights: NamedTensors,
        note: Callable[[str, str], None],
        give: Callable[[str, torch.Tensor], None] = lambda n, t: None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes the tensors on. Each is digested before the model gets it, for a loader may change
        it in place, and recorded only when the model takes it.
        """
        remaining = iter(weights)
        while batch := self._digested(remaining):
            for name, tensor, digest in batch:
                if self.digests is not None:
                    self.digests[name] = digest
                note(name, digest)
                give(name, tensor)
                yield name, tensor

    def _digested(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[Any]:
        """The next ones, with their digests."""
        with unseen():
            batch: list[tuple[str, torch.Tensor]] = []
            size = 0
            while len(batch) < _AHEAD and size < _BYTES_AHEAD and (item := next(weights, None)):
                batch.append(item)
                size += item[1].nbytes
            start = time.perf_counter()
            # All are queued, on the stream that received them, before the first is waited for.
            partials = [partial(tensor) for _, tensor in batch]
            digested = [(n, t, finish(p, t)) for (n, t), p in zip(batch, partials, strict=True)]
            self.seconds += time.perf_counter() - start
        return digested


_watches: list[Watch] = []  # of the load that runs, innermost last


def watching(watch: Watch, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls it and closes the watch. Threads that it starts find the watch by `watched`."""
    _watches.append(watch)
    try:
        result = watch.run(function, *args, **options)
    finally:
        _watches.remove(watch)
    watch.close()
    return result


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """As it is to be run in another thread, so that the load that runs sees what it does."""
    if not _watches:
        return function
    watch = _watches[-1]
    return lambda *args, **options: watch.run(function, *args, **options)


def _key(specs: Specs) -> str:
    text = "|".join(f"{name}:{dtype}:{[*shape]}" for name, dtype, shape in specs)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
