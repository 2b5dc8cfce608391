"""Which server is asked: the least busy one that answers, and for a group always the same one.

1. A group leases a server for one request at a time. It gets the one with the fewest outstanding
   tokens (prompt and budget of every sequence in flight); of equal ones the one that was chosen
   longest ago. It comes back to the server it had before, whose cache knows its tokens.
2. Leases are given in the order of the groups, as long as servers have room (`max_in_flight`
   sequences each); whoever finds no room, or no server, waits.
3. A server that fails a request, or answers garbage `GARBAGE_IN_A_ROW` times, is suspected aloud
   and avoided for a pause that doubles every time; then one request tries it, and if that ends
   well, all is well again. One that is busy is avoided likewise, and not suspected. A group does
   not go back to a server that failed it while there is another.
4. Servers that `serve_from` no longer names lose their requests (`Withdrawn`), and so do, after
   partial answers have been waited for (a router brings none), all of them at `recall`. An abort
   that SGLang hears of while it is paused is lost, and so are later ones of that request: what does
   not end after `_ABORTS_HEARD` of them is given up.
"""

import asyncio
import bisect
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from megarl.errors import ServerError
from megarl.rollout.client import Answer, Ask, Failure, Outcome, RolloutClient
from megarl.types import Member, RoutingShape, Sampling

log = logging.getLogger(__name__)

GARBAGE_IN_A_ROW = 3
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_ABORT_EVERY_S = 0.5
_ABORTS_HEARD = 10  # in a row, while nothing else of that server ends either
_RECALL_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Withdrawn:
    """The request was taken back before it was answered; that is nobody's failure."""


@dataclass(eq=False)
class Wish:
    """What a group wants a server for."""

    order: int  # lower ones first
    sequences: int
    tokens: int  # prompt and budget, of all sequences
    home: Member | None = None  # the server it had before
    avoid: frozenset[Member] = frozenset()
    urgent: bool = False  # not subject to `recall`
    granted: "asyncio.Future[Lease] | None" = None


class Lease:
    """A server, for one request."""

    def __init__(self, pool: "Pool", server: "_Server", wish: Wish) -> None:
        self._pool, self._server, self._wish = pool, server, wish
        self.recalled = False
        self._rids: list[str] = []
        self._asking: asyncio.Task[Outcome] | None = None

    @property
    def member(self) -> Member:
        return self._server.member

    @property
    def urgent(self) -> bool:
        return self._wish.urgent

    async def ask(
        self, asks: Sequence[Ask], sampling: Sampling, routing: RoutingShape | None
    ) -> Outcome | Withdrawn:
        if self.recalled or self._server.gone:
            return Withdrawn()
        self._rids = [ask.rid for ask in asks]
        asked = self._server.client.generate(asks, sampling, routing, self._pool.least_version)
        self._asking = asyncio.ensure_future(asked)
        try:
            await asyncio.wait([self._asking])
        except asyncio.CancelledError:
            self._asking.cancel()
            await asyncio.wait([self._asking])
            raise
        if self._asking.cancelled():
            return Withdrawn()
        outcome = self._asking.result()
        if not self._server.gone:
            self._pool.judge(self._server, outcome)
        return outcome

    def withdraw(self) -> None:
        """Gives up at once what is in flight; what a server still does of it is aborted."""
        if self._asking is not None:
            self._asking.cancel()

    async def recall(self) -> None:
        """Has the server end what is in flight, and waits for what it answers then; or gives it up,
        where nothing can be asked back.
        """
        self.recalled = True
        asking = self._asking
        if asking is None:
            return
        if self._server.client.can_abort:
            await self._abort(asking)
        if not asking.done():
            asking.cancel()
            await asyncio.wait([asking])

    async def _abort(self, asking: "asyncio.Task[Outcome]") -> None:
        """Until it has ended, or nothing speaks for it that it will."""
        server, loop = self._server, asyncio.get_running_loop()
        deadline = loop.time() + _RECALL_TIMEOUT_S
        heard, running = 0, len(server.leases)
        while not asking.done() and heard < _ABORTS_HEARD and loop.time() < deadline:
            # Again and again: an abort that comes before its request is one of nothing.
            heard += await server.client.abort(self._rids)
            await asyncio.wait([asking], timeout=_ABORT_EVERY_S)
            if len(server.leases) < running:
                heard, running = 0, len(server.leases)
        if asking.done():
            return
        if heard:
            where = f"{server.member.name} ({server.member.url})"
            log.warning("%s: aborts did not end a request; it is given up", where)
        else:
            self._pool.fail(server, f"no answer {_RECALL_TIMEOUT_S:g} s after an abort")

    def end(self) -> None:
        """Lets go of the answer, which would otherwise live until cycles are looked for."""
        self._asking = self._wish.granted = None


@dataclass(eq=False)
class _Server:
    member: Member
    client: RolloutClient
    leases: set[Lease] = field(default_factory=set)
    in_flight: int = 0  # sequences
    outstanding: int = 0  # tokens
    chosen: int = 0  # when, counted in leases
    failures: int = 0  # pauses since it last ended a request well
    garbage: int = 0  # answers in a row
    avoided_until: float = 0.0
    gone: bool = False

    def usable(self, now: float) -> bool:
        return now >= self.avoided_until and not (self.failures and self.leases)


class Pool:
    """Belongs to one event loop. `connect` makes a member's client; `suspected` hears of those that
    fail.
    """

    def __init__(
        self,
        connect: Callable[[Member], RolloutClient],
        suspected: Callable[[Member, str], None],
        max_in_flight: int | None = None,
    ) -> None:
        self._connect, self._suspected = connect, suspected
        self._max_in_flight = max_in_flight
        self.least_version = 0  # of the weights that all of them have
        self._servers: dict[Member, _Server] = {}
        self._waiting: list[Wish] = []  # ascending
        self._paused = False
        self._leased = itertools.count(1)
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def members(self) -> list[Member]:
        return list(self._servers)

    def serve_from(self, members: Sequence[Member], version: int = 0) -> None:
        """These and no others, all of which have weights of this version at least."""
        self.least_version = version
        for member in [m for m in self._servers if m not in members]:
            server = self._servers.pop(member)
            server.gone = True
            log.info("%s (%s) is not asked any more", member.name, member.url)
            for lease in server.leases:
                lease.withdraw()
            self._close_if_idle(server)
        for member in members:
            if member not in self._servers:
                log.info("%s (%s) is asked from now on", member.name, member.url)
                self._servers[member] = _Server(member, self._connect(member))
        self._place()

    @contextlib.asynccontextmanager
    async def lease(self, wish: Wish, patience_s: float | None = None) -> AsyncIterator[Lease]:
        """Waits for a server, as long as it takes. Raises ServerError where none is to be had for
        `patience_s`; those that are only busy are waited for.
        """
        wish.granted = asyncio.get_running_loop().create_future()
        bisect.insort(self._waiting, wish, key=lambda w: (not w.urgent, w.order))
        self._place()
        try:
            while not wish.granted.done():
                await asyncio.wait([wish.granted], timeout=patience_s)
                if patience_s and not wish.granted.done() and not self._serving:
                    raise ServerError(f"no rollout server answered for {patience_s:g} s")
            lease = wish.granted.result()
        except (asyncio.CancelledError, ServerError):
            if wish.granted.done():
                self._release(wish.granted.result())
            else:
                self._waiting.remove(wish)
            raise
        try:
            yield lease
        finally:
            self._release(lease)

    @property
    def _serving(self) -> bool:
        now = asyncio.get_running_loop().time()
        return any(s.leases or s.usable(now) for s in self._servers.values())

    async def recall(self) -> None:
        """No server has any request when it returns, but urgent ones; nobody gets one until
        `resume`."""
        self._paused = True
        leases = [lease for s in self._servers.values() for lease in s.leases]
        await asyncio.gather(*(lease.recall() for lease in leases if not lease.urgent))

    def resume(self) -> None:
        self._paused = False
        self._place()

    async def close(self) -> None:
        self.serve_from([])
        await asyncio.gather(*self._closing, return_exceptions=True)

    def client(self, member: Member) -> RolloutClient:
        return self._servers[member].client

    def judge(self, server: _Server, outcome: Outcome) -> None:
        """What a request's end says of its server."""
        if isinstance(outcome, Failure) and outcome.busy:
            self._avoid(server, outcome.reason)
        elif isinstance(outcome, Failure):
            self.fail(server, outcome.reason)
        elif isinstance(outcome, Answer) and outcome.wrong:
            server.garbage += 1
            log.warning("%s (%s): %s", server.member.name, server.member.url, outcome.wrong)
            if server.garbage % GARBAGE_IN_A_ROW == 0:
                count = f"{server.garbage} wrong answers in a row"
                self.fail(server, f"{count}; the last one: {outcome.wrong}")
        else:
            server.failures = server.garbage = 0
            server.avoided_until = 0.0

    def fail(self, server: _Server, reason: str) -> None:
        if self._avoid(server, reason):
            self._suspected(server.member, reason)

    def _avoid(self, server: _Server, reason: str) -> bool:
        """False where it is already, or gone."""
        loop = asyncio.get_running_loop()
        if server.gone or loop.time() < server.avoided_until:
            return False  # requests that were in flight together fail together: one failure
        pause = min(_PAUSE_S * 2**server.failures, _LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)
        server.failures += 1
        server.avoided_until = loop.time() + pause
        loop.call_later(pause + 0.001, self._place)  # never a moment too early
        member = server.member
        log.warning("%s (%s): %s; avoided for %.1f s", member.name, member.url, reason, pause)
        return True

    def _place(self) -> None:
        """Gives servers to those who wait, in their order, as far as there is room."""
        now = asyncio.get_running_loop().time()
        usable = [s for s in self._servers.values() if s.usable(now)]
        left: list[Wish] = []
        for at, wish in enumerate(self._waiting):
            if self._paused and not wish.urgent:
                left += self._waiting[at:]
                break
            server, bound = self._choose(wish, usable)
            if server is not None:
                self._grant(wish, server)
                if not server.usable(now):
                    usable.remove(server)
                continue
            left.append(wish)
            if not bound:
                left += self._waiting[at + 1 :]
                break
        self._waiting = left

    def _choose(self, wish: Wish, usable: Sequence[_Server]) -> tuple[_Server | None, bool]:
        """A server with room, if there is one; and whether others might be luckier."""
        home = [s for s in usable if s.member == wish.home and s.member not in wish.avoid]
        others = [s for s in usable if s.member not in wish.avoid]
        candidates = home or others or usable
        room = [s for s in candidates if self._has_room(s, wish.sequences)]
        best = min(room, key=lambda s: (s.outstanding, s.chosen), default=None)
        return best, len(candidates) < len(usable)

    def _has_room(self, server: _Server, sequences: int) -> bool:
        most = self._max_in_flight
        return most is None or not server.in_flight or server.in_flight + sequences <= most

    def _grant(self, wish: Wish, server: _Server) -> None:
        assert wish.granted is not None
        lease = Lease(self, server, wish)
        server.leases.add(lease)
        server.in_flight += wish.sequences
        server.outstanding += wish.tokens
        server.chosen = next(self._leased)
        wish.granted.set_result(lease)

    def _release(self, lease: Lease) -> None:
        server, wish = lease._server, lease._wish
        lease.end()
        server.leases.discard(lease)
        server.in_flight -= wish.sequences
        server.outstanding -= wish.tokens
        if server.gone:
            self._close_if_idle(server)
        self._place()

    def _close_if_idle(self, server: _Server) -> None:
        if not server.leases:
            task = asyncio.ensure_future(server.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
