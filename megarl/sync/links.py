"""The sending end of weight groups: which servers share one, and what becomes of one that breaks.

1. A group joins one sender with servers. Over gloo every server has a group of its own: a broadcast
   in gloo is a tree, in which one that hangs holds up those behind it. Over NCCL all servers of a
   push share one, so that the sender's link carries a bucket once, however many they are; then
   senders take turns (turns.py).
2. A group lasts as long as its servers are named by (name, boot). One that is not named for
   `_IDLE_PUSHES` pushes is left.
3. A group is broken by its first failure, and never used again. Those of its servers that are not
   to blame have to join another and get everything anew.
"""

import itertools
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megarl.errors import SyncError
from megarl.protocols import WeightSink
from megarl.sync.asking import ask, failed, failure, first_error, in_background, refusals
from megarl.sync.carrier import Identity, Outcome, identities
from megarl.sync.group import abandon_group, create_store, join_group, leave_group
from megarl.sync.packing import Packed, described
from megarl.sync.turns import Turns

log = logging.getLogger(__name__)

SHARED = {"gloo": False, "nccl": True}  # rule 1, by backend

_LEAVE_S = 5.0
_ALIVE_S = 10.0
_ACCOUNT_S = 1.0  # for a server to say what failed, when its group has
_IDLE_PUSHES = 8


@dataclass(eq=False)
class Link:
    """One group, and the broadcast under way in it."""

    name: str
    sinks: tuple[WeightSink, ...]
    group: dist.ProcessGroup
    store: Any  # NCCL connects late
    work: dist.Work | None = None
    unnamed: int = 0  # pushes in a row that did not name its servers

    @property
    def key(self) -> tuple[Identity, ...]:
        return identities(self.sinks)

    @property
    def names(self) -> set[str]:
        return {sink.name for sink in self.sinks}


class Links:
    """The groups of one sender: a ``Carrier``."""

    session = True
    keeps = False

    def __init__(
        self, label: str, backend: str, timeout_s: float, turns: Turns | None = None
    ) -> None:
        """``label`` of the sender, for names. ``turns``: servers share groups, and senders take
        turns; None: every server has a group of its own.
        """
        # of its own for every run: a server may still be in the group of one that was killed
        self._name = f"megarl-{uuid.uuid4().hex[:8]}-{label}"
        self._backend, self._timeout_s, self._turns = backend, timeout_s, turns
        self._links: dict[tuple[Identity, ...], Link] = {}
        self._numbers = itertools.count(1)

    def open(self, sinks: Sequence[WeightSink], attempt: int) -> Outcome:
        """Groups with all of these servers, those that exist already included."""
        if self._turns is None:
            return self._open(sinks)
        self._turns.begin(str(attempt))
        return self._in_turn(self._turns, lambda: self._open(sinks), {s.name for s in sinks})

    def _open(self, sinks: Sequence[WeightSink]) -> Outcome:
        parts = [(sink,) for sink in sinks] if self._turns is None else [tuple(sinks)]
        wanted = {identities(part): part for part in parts if part}
        self._retire(wanted.keys(), {sink.name for sink in sinks})
        outcome = Outcome()
        missing = [part for key, part in wanted.items() if key not in self._links]
        for result in [in_background(self._join, part) for part in missing]:
            link, found = result.result()
            outcome.add(found.lost, found.again)
            if link is not None:
                self._links[link.key] = link
        return outcome

    def send(self, bucket: Packed, names: set[str]) -> Outcome:
        if self._turns is None:
            return self._send(bucket, names)
        return self._in_turn(self._turns, lambda: self._send(bucket, names), names)

    def buffer(self, num_bytes: int) -> None:
        """Wherever it is packed it can be broadcast from."""

    def finish(
        self, version: int, digests: Mapping[str, str], sinks: Sequence[WeightSink]
    ) -> Outcome:
        """They have everything already."""
        return Outcome()

    def drop(self, names: Iterable[str]) -> None:
        """The groups that these servers are in are broken."""
        for link in [k for k in self._links.values() if k.names & set(names)]:
            self._abandon(link)

    def close(self) -> None:
        """Leaves all groups, and lets the servers leave. Servers that are gone are no error."""
        parting = [(link, _part(link.name, link.sinks)) for link in self._links.values()]
        self._links.clear()
        for link, replies in parting:
            leave_group(link.group)
            for sink, reply in zip(link.sinks, replies, strict=True):
                if (error := reply.exception()) is not None:
                    log.warning("%s: leaving weight group %s: %s", sink.name, link.name, error)

    def _in_turn(self, turns: Turns, act: Callable[[], Outcome], names: set[str]) -> Outcome:
        """What another sender's turn has broken is not waited for once more."""
        with turns() as whole:
            if not whole:
                return Outcome(again=set(names))
            outcome = act()
            if outcome.out():
                turns.fail()
            return outcome

    # ---- joining and leaving -------------------------------------------------------------------

    def _retire(self, wanted: Iterable[tuple[Identity, ...]], names: set[str]) -> None:
        for key, link in list(self._links.items()):
            link.unnamed = 0 if key in wanted else link.unnamed + 1
            if link.unnamed > _IDLE_PUSHES or (link.unnamed and link.names & names):
                self._abandon(link)

    def _join(self, sinks: tuple[WeightSink, ...]) -> tuple[Link | None, Outcome]:
        name = f"{self._name}-{next(self._numbers)}"
        sizes = [sink.ranks for sink in sinks]
        world = 1 + sum(sizes)
        try:
            address = sinks[0].local_address.strip("[]")
        except OSError as error:  # nobody knows where it is
            return None, self._blame(sinks, {sinks[0].name: str(error)}, str(error))
        store, port = create_store(address, timeout_s=self._timeout_s)
        joins = [
            ask(
                sink,
                "join_group",
                {
                    "master_address": address,
                    "master_port": port,
                    "rank_offset": 1 + sum(sizes[:k]),
                    "world_size": world,
                    "group_name": name,
                    "backend": self._backend,
                    "timeout_s": self._timeout_s,  # which SGLang does not know
                },
                self._timeout_s,
            )
            for k, sink in enumerate(sinks)
        ]
        endpoint = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        mine: Future[Any] = in_background(
            join_group,
            endpoint,
            rank=0,
            world_size=world,
            group_name=name,
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        # a server that refuses says so at once; our own joining would only time out
        wait([*joins, mine], return_when=FIRST_EXCEPTION)
        if not any(failed(future) for future in (*joins, mine)):
            return Link(name, sinks, mine.result(), store), Outcome()
        del store  # whoever still waits in it, here or there, gives up at once
        mine.add_done_callback(self._end_joined)
        _part(name, sinks)
        return None, self._blame(sinks, refusals(sinks, joins), first_error([*joins, mine]))

    def _end_joined(self, mine: "Future[dist.ProcessGroup]") -> None:
        if not failed(mine):
            abandon_group(mine.result(), self._backend)

    # ---- a bucket ------------------------------------------------------------------------------

    def _send(self, bucket: Packed, names: set[str]) -> Outcome:
        links = [link for link in self._links.values() if link.names <= names]
        missing = names.difference(*(link.names for link in links))
        if missing:
            raise SyncError(f"tensors to send, and no group with {', '.join(sorted(missing))}")
        under_way = [(link, self._start(link, bucket)) for link in links]
        outcome = Outcome()
        for link, replies in under_way:
            found = self._finish(link, replies)
            outcome.add(found.lost, found.again)
        return outcome

    def _start(self, link: Link, bucket: Packed) -> list[Future[Any]]:
        message = {**described(bucket), "group_name": link.name}
        replies = [ask(sink, "receive", message, self._timeout_s) for sink in link.sinks]
        try:
            link.work = dist.broadcast(bucket.flat, group_src=0, group=link.group, async_op=True)
        except RuntimeError as error:  # the other end is gone already
            # Not the error itself: its traceback would keep the group alive, and open.
            replies.append(failure(str(error)))
        return replies

    def _finish(self, link: Link, replies: list[Future[Any]]) -> Outcome:
        """Waits for the servers before it waits for the broadcast: one that refuses says so at
        once, and the broadcast would only time out.
        """
        wait(replies, return_when=FIRST_EXCEPTION)
        broken = first_error(replies)
        if not broken and link.work is not None:
            try:
                link.work.wait()
                link.work = None
            except RuntimeError as error:
                broken = str(error)
        if not broken:
            return Outcome()
        closing = self._abandon(link)
        wait(replies, timeout=_ACCOUNT_S)
        if len(link.sinks) > 1:  # until then the others may still wait in it
            wait([closing], timeout=self._timeout_s + _ACCOUNT_S)
        return self._blame(link.sinks, refusals(link.sinks, replies), broken)

    # ---- failures ------------------------------------------------------------------------------

    def _blame(
        self, sinks: Sequence[WeightSink], refused: Mapping[str, str], broken: str
    ) -> Outcome:
        """Who is lost with a broken group. Of several servers those that do not answer any more;
        if all do, those that refused: refusals may only be the echo of a death.
        """
        outcome = Outcome()
        if len(sinks) == 1:
            name = sinks[0].name
            outcome.add({name: refused.get(name) or f"{name}: {broken}"}, ())
            return outcome
        answers = [ask(sink, "alive", {}, min(_ALIVE_S, self._timeout_s)) for sink in sinks]
        wait(answers)
        dead = {
            sink.name: refused.get(sink.name) or str(answer.exception())
            for sink, answer in zip(sinks, answers, strict=True)
            if failed(answer)
        }
        outcome.add(dead or refused, (sink.name for sink in sinks))
        return outcome

    def _abandon(self, link: Link) -> "Future[None]":
        """Closes this end, which ends what the servers wait for in it, and lets them forget it.
        Done when it is closed: over gloo a broadcast may have to time out first.
        """
        del self._links[link.key]
        link.work = None
        closing = in_background(_end_group, link, self._backend)
        _part(link.name, link.sinks)
        return closing


def _end_group(link: Link, backend: str) -> None:
    group = link.group
    del link.group  # the last reference ends here, with this function
    abandon_group(group, backend)


def _part(group: str, sinks: Iterable[WeightSink]) -> list[Future[Any]]:
    """Has the servers leave a group; it is nobody's failure if they do not."""
    return [ask(sink, "leave_group", {"group_name": group}, _LEAVE_S) for sink in sinks]
