"""A copy of what came in buckets of changes, tensor by tensor as it came, for the next change.

SGLang cuts and joins tensors, so a change of one has no place in its model. The copy is in host
memory, once on a machine (node_memory.py), and the model gets whole tensors of it. It is kept from
when a trainer first asks what is held (`agree`), and given back when a whole update came by
another way.

1. Every rank gets the same buckets in the same order, so all give a tensor the same place. Of the
   tensors of a bucket each of the ranks that share a file writes every n-th one; a change may add
   to what is there, so it must be made once. Nobody reads before all have said that they are done.
2. A tensor comes once in an update (a second time is refused), and SGLang's ranks meet in a barrier
   at the beginning and at the end of an update. So whoever still reads a bucket reads what nobody
   writes. Were it otherwise, digests would tell: a rank digests the copy that it gives its model,
   and no other.
3. A digest is known of what was read back after it was written, and forgotten before the next
   change. A change of anything else is refused before anything is written.
4. Buckets that a rank refuses, or that do not come to it, leave the others waiting: one that
   refuses says so, and one that is silent costs them the deadline. Before each push `agree` says
   how far everybody is, and whether all have the same places; if not, they begin anew.
"""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .envelope import DeltaError, Entry, Envelope
from .node_memory import NodeMemory
from .plain_delta import apply_delta

_native_apply: Callable[[torch.Tensor, torch.Tensor], None] | None = None
with contextlib.suppress(ImportError):
    from megarl.ops import delta_apply_ as _native_apply

log = logging.getLogger(__name__)

DEADLINE_S = 100.0  # for other ranks; trainers wait for 120 s unless they are told otherwise
_ALIGNED = 64
Exchange = Callable[[list[int]], list[list[int]]]
"""Collective among tensor-parallel ranks: as many numbers of each, in order of ranks."""


class Place(NamedTuple):
    at: int  # of all places
    tensor: torch.Tensor  # in the form that it came in


@dataclass
class Sharing:
    """The file, and the ranks that share it: of each, buckets at the last `agree`."""

    memory: NodeMemory
    rank: int
    started: dict[int, int]
    count: int = 0  # buckets of this rank

    @property
    def first(self) -> bool:
        return self.rank == min(self.started)

    def share(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Those that this rank writes."""
        ranks = sorted(self.started)
        return entries[ranks.index(self.rank) :: len(ranks)]

    def due(self) -> list[tuple[int, int]]:
        """Of all: (rank, its count when it has this bucket, too)."""
        more = self.count - self.started[self.rank]
        return [(rank, started + more) for rank, started in self.started.items()]


@dataclass
class Shadow:
    """Of one process, whatever models it has. `digests` by name, of what is certain to be held."""

    deadline_s: float = DEADLINE_S
    digests: dict[str, str] = field(default_factory=dict)
    _places: dict[str, Place] = field(default_factory=dict)
    _size: int = 0  # of all places
    _sharing: Sharing | None = None
    _off: bool = False  # for good
    _update: set[str] = field(default_factory=set)  # what came in this update
    _last: tuple[object, set[int]] = (None, set())  # the bucket, and models that have got it

    # --- between updates --------------------------------------------------------------------------

    def agree(self, rank: int, exchange: Exchange) -> None:
        """Collective: from now on, what comes is kept. What goes wrong is logged, and nothing is
        kept.
        """
        try:
            self._agree(rank, exchange)
        except (RuntimeError, OSError) as error:
            self._stop(str(error))

    def begin(self) -> None:
        self._update = set()

    def end(self) -> None:
        if self._off or (not self._update and not self.digests):
            self._drop()

    # --- in an update -----------------------------------------------------------------------------

    def receive(self, envelope: Envelope, model: object) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that a bucket makes, copied to where it came to, one by one. A bucket may
        come to several models of a process; it is done once. Raises DeltaError.
        """
        identity, models = self._last
        if envelope.identity != identity or id(model) in models:
            self._last = None, set()
            self._take(envelope.entries)
            self._last = envelope.identity, {id(model)}
        else:
            models.add(id(model))
        return self._copies(envelope)

    def note(self, name: str, digest: str) -> None:
        """Of a tensor that `receive` gave."""
        if name in self._places and name in self._update:
            self.digests[name] = digest

    def void(self, name: str) -> None:
        """It came otherwise."""
        self.digests.pop(name, None)

    def _take(self, entries: list[Entry]) -> None:
        sharing = self._sharing
        if sharing is not None:
            sharing.count += 1
        try:
            self._check(entries)
            for entry in entries:
                self.digests.pop(entry.name, None)
                self._update.add(entry.name)
            if sharing is None:
                return
            self._place(sharing, entries)
            for entry in sharing.share(entries):
                if entry.name in self._places:
                    _write(self._places[entry.name].tensor, entry)
            sharing.memory.say(sharing.rank, sharing.count)
            sharing.memory.wait(sharing.due(), self.deadline_s)
        except (RuntimeError, ValueError, OSError) as error:
            if sharing is not None:
                sharing.memory.say(sharing.rank, -sharing.count)
            raise DeltaError(f"changes of weights: {error}") from error

    def _check(self, entries: list[Entry]) -> None:
        names = [entry.name for entry in entries]
        twice = sorted(self._update.intersection(names)) or len(set(names)) < len(names)
        if twice:
            raise DeltaError(f"a name came twice in one update: {twice}")
        for entry in entries:
            if entry.base is None:
                continue
            held = self.digests.get(entry.name)
            if held != entry.base or not self._fits(entry):
                raise DeltaError(
                    f"{entry.name} came as a change of {entry.base}, but what is held is "
                    f"{held or 'unknown'}"
                )

    def _fits(self, entry: Entry) -> bool:
        place = self._places.get(entry.name)
        if place is None:
            return False
        return (tuple(place.tensor.shape), place.tensor.dtype) == (entry.shape, entry.dtype)

    def _place(self, sharing: Sharing, entries: list[Entry]) -> None:
        """A place for what has none."""
        new = [entry for entry in entries if not self._fits(entry)]
        if not new or self._off:
            return
        for entry in new:
            self._places.pop(entry.name, None)
        sizes = [-(-entry.num_bytes // _ALIGNED) * _ALIGNED for entry in new]
        memory, deadline_s = sharing.memory, self.deadline_s
        piece = memory.grow(sum(sizes), takes=sharing.first, deadline_s=deadline_s)
        if piece is None:
            self._off = True  # the rest at the end of this update: changes may still come
            log.warning(
                "megarl: too little memory to keep weights for sync.delta, beyond the %d MB so "
                "far: this server gets whole weights until it is started again",
                self._size >> 20,
            )
            return
        for entry, part in zip(new, piece.split(sizes), strict=True):
            tensor = part[: entry.num_bytes].view(entry.dtype).view(entry.shape)
            self._places[entry.name] = Place(self._size, tensor)
            self._size += len(part)

    def _copies(self, envelope: Envelope) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in envelope.entries:
            place = self._places.get(entry.name)
            if place is None or not self._fits(entry):
                yield entry.name, entry.whole()
            else:
                yield entry.name, place.tensor.to(envelope.device, copy=True)

    # --- among ranks ------------------------------------------------------------------------------

    def _agree(self, rank: int, exchange: Exchange) -> None:
        count = 0 if self._sharing is None else self._sharing.count
        told = exchange([self._off, self._layout(), count])
        if any(off for off, *_ in told):
            if not self._off:
                self._stop("another rank does not")
            return
        layouts = {layout for _, layout, _ in told}
        if len(layouts) > 1 or self._sharing is None:
            self._join(rank, exchange)
            return
        sharing = self._sharing
        for other in sharing.started:
            sharing.started[other] = told[other][2]
        sharing.memory.say(rank, sharing.count)  # after a failure it has said something else
        exchange([0])  # and nobody is asked before

    def _join(self, rank: int, exchange: Exchange) -> None:
        self._drop()
        mine: NodeMemory | None = None
        with contextlib.suppress(OSError):
            mine = NodeMemory.create()
        offers = exchange([0, 0, 0, 0] if mine is None else mine.address)
        memory, whose = mine, -1 if mine is None else rank
        for other in range(rank):
            found = NodeMemory.open(offers[other])
            if found is not None:
                memory, whose = found, other
                break
        chosen = [other for [other] in exchange([whose])]
        if mine is not None and memory is not mine:
            mine.close()  # everybody has opened what they take
        if memory is None or -1 in chosen:
            self._stop("a rank has found no memory for them")
            return
        sharers = [k for k, other in enumerate(chosen) if other == whose]
        self._sharing = Sharing(memory, rank, dict.fromkeys(sharers, 0))
        log.info("megarl: weights for sync.delta are kept, by ranks %s together", sharers)

    def _layout(self) -> int:
        """All ranks' is the same where they have the same places. 0: nothing is kept."""
        if self._sharing is None:
            return 0
        places = [(n, p.at, tuple(p.tensor.shape), p.tensor.dtype) for n, p in self._places.items()]
        text = repr((self._size, places)).encode()
        return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")

    def _stop(self, why: str) -> None:
        self._off = True
        self._drop()
        log.warning("megarl: weights for sync.delta are not kept: %s", why)

    def _drop(self) -> None:
        """The memory is free when all ranks have done so."""
        self.digests.clear()
        self._places.clear()
        self._size = 0
        self._last = None, set()
        if self._sharing is not None:
            self._sharing.memory.close()
        self._sharing = None


def _write(place: torch.Tensor, entry: Entry) -> None:
    payload = entry.payload.cpu()
    if entry.base is None:
        place.view(-1).view(torch.uint8).copy_(payload)
    else:
        (_native_apply or apply_delta)(place, payload)
