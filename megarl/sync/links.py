"""The sending end of weight groups: which servers share one, and what becomes of one that breaks.

1. A group joins one sender with servers. Over gloo every server has a group of its own: a broadcast
   in gloo is a tree, in which one that hangs holds up those behind it. Over NCCL all servers of a
   push share one, so that the sender's link carries a bucket once, however many they are; then
   senders take turns (turns.py).
2. A group lasts as long as its servers are named by (name, boot). One that is not named for
   `_IDLE_PUSHES` pushes is left.
3. A group is broken by its first failure, and never used again. Those of its servers that are not
   to blame have to join another and get everything anew. To blame are those that do not answer any
   more, or else those that refused. If there is none of either, all have waited for one of them in
   vain: each gets a group of its own in the next attempt, and shows who it was.
4. Servers' replies decide, each with a deadline, never the collective. Over NCCL that may block as
   it connects, and later torch ends the process that waits in it for the group's own timeout: so it
   has a thread, and a timeout that is longer than any reply's.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megarl.errors import NoAnswerError, SyncError
from megarl.protocols import WeightSink
from megarl.sync.asking import ask, failed, first_error, in_background, refusals
from megarl.sync.carrier import Identity, Outcome, identities
from megarl.sync.group import abandon_group, create_store, join_group, leave_group, prefix_of
from megarl.sync.packing import Packed, described
from megarl.sync.turns import Turns

log = logging.getLogger(__name__)

SHARED = {"gloo": False, "nccl": True}  # rule 1, by backend

_LEAVE_S = 5.0
_ALIVE_S = 10.0
_ACCOUNT_S = 1.0  # for a server to say what failed, when its group has
_SPARE_S = 60.0  # of a group's own timeout, for breaking it before (rule 4)
_IDLE_PUSHES = 8


@dataclass(eq=False)
class Link:
    """One group, and the broadcast under way in it."""

    name: str
    sinks: tuple[WeightSink, ...]
    group: dist.ProcessGroup
    store: Any  # NCCL connects late
    work: "Future[None] | None" = None
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
        self, trainer: str, label: str, backend: str, timeout_s: float, turns: Turns | None = None
    ) -> None:
        """``trainer``: another name for every start of a run, the same in all its senders: where it
        joins, groups of others are left. ``label``: of the sender. ``turns``: servers share groups,
        and senders take turns; None: every server has a group of its own.
        """
        self._name = prefix_of(trainer) + label
        self._backend, self._timeout_s, self._turns = backend, timeout_s, turns
        self._group_timeout_s = timeout_s
        if SHARED[backend]:
            self._group_timeout_s = 2 * timeout_s + _SPARE_S
        self._apart: set[str] = set()  # servers that the next attempt has to tell apart
        self._links: dict[tuple[Identity, ...], Link] = {}
        self._numbers = itertools.count(1)

    def open(self, sinks: Sequence[WeightSink], attempt: int) -> Outcome:
        """Groups with all of these servers, those that exist already included."""
        if self._turns is None:
            return self._open(sinks)
        self._turns.begin(str(attempt))
        return self._in_turn(self._turns, lambda: self._open(sinks), {s.name for s in sinks})

    def _open(self, sinks: Sequence[WeightSink]) -> Outcome:
        alone = [s for s in sinks if self._turns is None or s.name in self._apart]
        shared = tuple(s for s in sinks if s not in alone)
        self._apart = set()
        wanted = {identities(part): part for part in (*((s,) for s in alone), shared) if part}
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
        addresses, unknown = self._addresses(sinks)
        if unknown:
            return None, Outcome(lost=unknown, again={sink.name for sink in sinks} - unknown.keys())
        host = addresses[0] if len(set(addresses)) == 1 else "localhost"  # on all interfaces
        store, port = create_store(host, timeout_s=self._timeout_s)
        joins = [
            ask(
                sink,
                "join_group",
                {
                    "master_address": addresses[k],
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
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        mine: Future[Any] = in_background(
            join_group,
            endpoint,
            rank=0,
            world_size=world,
            group_name=name,
            backend=self._backend,
            timeout_s=self._group_timeout_s,
        )
        # a server that refuses says so at once; our own joining would only time out
        wait([*joins, mine], return_when=FIRST_EXCEPTION)
        if not any(failed(future) for future in (*joins, mine)):
            return Link(name, sinks, mine.result(), store), Outcome()
        del store  # whoever still waits in it, here or there, gives up at once
        mine.add_done_callback(self._end_joined)
        _part(name, sinks)
        broken, where = (
            first_error([*joins, mine]),
            f"joining group {name} of {world} at {endpoint}",
        )
        return None, self._blame(sinks, joins, broken, where)

    def _addresses(self, sinks: Sequence[WeightSink]) -> tuple[list[str], dict[str, str]]:
        """This machine's, as each server reaches it; and why it is not known, by server."""
        found, unknown = [], {}
        for sink in sinks:
            try:
                found.append(sink.local_address.strip("[]"))
            except OSError as error:
                unknown[sink.name] = str(error)
        return found, unknown

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
        what = f"{len(bucket.specs)} tensors from {bucket.specs[0].name} on"
        outcome = Outcome()
        for link, replies in under_way:
            found = self._finish(link, replies, f"group {link.name}, {what}")
            outcome.add(found.lost, found.again)
        return outcome

    def _start(self, link: Link, bucket: Packed) -> list[Future[Any]]:
        message = {**described(bucket), "group_name": link.name}
        replies = [ask(sink, "receive", message, self._timeout_s) for sink in link.sinks]
        link.work = in_background(_broadcast, bucket.flat, link.group)
        return replies

    def _finish(self, link: Link, replies: list[Future[Any]], what: str) -> Outcome:
        """A server that refuses says so at once; the broadcast would only time out."""
        assert link.work is not None
        wait([*replies, link.work], return_when=FIRST_EXCEPTION)
        broken = first_error([*replies, link.work])
        if not broken:
            link.work = None
            return Outcome()
        closing = self._abandon(link)
        wait(replies, timeout=_ACCOUNT_S)
        if len(link.sinks) > 1:  # until then the others may still wait in it
            wait([closing], timeout=self._timeout_s + _ACCOUNT_S)
        return self._blame(link.sinks, replies, broken, what)

    # ---- failures ------------------------------------------------------------------------------

    def _blame(
        self, sinks: Sequence[WeightSink], replies: Sequence[Future[Any]], broken: str, what: str
    ) -> Outcome:
        """Who is lost with a broken group (rule 3). A refusal may only be the echo of another's
        death, and a deadline that passes may be another's, too.
        """
        outcome, refused = Outcome(), refusals(sinks, replies)
        if len(sinks) == 1:
            name = sinks[0].name
            outcome.add({name: f"{refused.get(name) or f'{name}: {broken}'} ({what})"}, ())
            return outcome
        answers = [ask(sink, "alive", {}, min(_ALIVE_S, self._timeout_s)) for sink in sinks]
        wait(answers)
        pairs = zip(sinks, answers, strict=True)
        dead = {s.name: refused.get(s.name) or first_error([a]) for s, a in pairs if failed(a)}
        silent = {s.name for s, r in zip(sinks, replies, strict=True) if _is_silence(r)}
        guilty = dead or {name: why for name, why in refused.items() if name not in silent}
        if not guilty:
            self._apart |= {sink.name for sink in sinks}
        outcome.add({n: f"{why} ({what})" for n, why in guilty.items()}, (s.name for s in sinks))
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


def _is_silence(reply: Future[Any]) -> bool:
    return failed(reply) and isinstance(reply.exception(), NoAnswerError)


def _broadcast(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Returns when it has arrived. Raises RuntimeError."""
    work = dist.broadcast(flat, group_src=0, group=group, async_op=True)
    if work is not None:
        work.wait()


def _end_group(link: Link, backend: str) -> None:
    group = link.group
    del link.group  # the last reference ends here, with this function
    abandon_group(group, backend)


def _part(group: str, sinks: Iterable[WeightSink]) -> list[Future[Any]]:
    """Has the servers leave a group; it is nobody's failure if they do not."""
    return [ask(sink, "leave_group", {"group_name": group}, _LEAVE_S) for sink in sinks]
