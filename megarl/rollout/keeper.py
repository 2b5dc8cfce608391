"""One server through a run: a thread that watches over it, and says whether it may be asked.

1. A server is a member from the answer to its first probe until it ends, is given up, or leaves
   two probes in a row unanswered. One unanswered probe is only a reason to ask again at once.
2. A boot that was withdrawn never comes back: whoever returns is a new one, since it may have
   missed weights meanwhile.
3. Nothing that was asked before or inside a `Hold` counts: servers pause while weights arrive.
"""

import logging
import queue
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from megarl.errors import ServerError
from megarl.rollout.features import features_of
from megarl.rollout.managed import ManagedServer
from megarl.rollout.probe import Identity, Probe
from megarl.rollout.starter import Starter
from megarl.types import Member

log = logging.getLogger(__name__)

_AGAIN_S = 0.5  # before the second probe, where the first was refused rather than left waiting
_BACK_OFF_S = (1.0, 60.0)  # after the first failure, and at most
_WELL_S = 300.0  # a server that has served for so long starts its back-off anew
_KILL_S = 10.0
_GENEROUS = 4  # a token of our own waits behind the others' requests


@dataclass(frozen=True)
class ServerDeath:
    """A server that ended, or hangs, without being told to."""

    name: str
    cause: str  # "exit code 3", "signal SIGKILL", "hangs: ...", with the end of its log

    def __str__(self) -> str:
        return f"{self.name} died: {self.cause}"


class Hold:
    """Spans of time in which nobody is probed; they may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open, self._begun = 0, 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
            self._begun += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1

    def mark(self) -> int | None:
        """None inside; else a number that stays the same until the next one begins."""
        with self._lock:
            return None if self._open else self._begun


@dataclass
class Care:
    """How servers are watched over."""

    key: str
    probe_every_s: float
    probe_timeout_s: float
    restart: bool
    max_restarts: int
    report: Callable[[ServerDeath], None]  # of what ends the run
    say: Callable[[str], None]
    hold: Hold = field(default_factory=Hold)
    events: Counter[str] = field(default_factory=Counter)  # restarts and what `_End` knows


@dataclass(frozen=True)
class _Order:
    kind: Literal["suspect", "end", "close"]
    boot: str = ""
    end: "_End | None" = None
    reason: str = ""


@dataclass(frozen=True)
class _End:
    """Why a server is no member any more; `kind` is what it counts as in `Care.events`."""

    kind: Literal["closed", "died", "hung", "given_up", "replaced"]
    reason: str = ""

    def __str__(self) -> str:
        return _WORDS[self.kind] + self.reason


_WORDS = {
    "closed": "closed",
    "died": "died",
    "hung": "hangs: ",
    "given_up": "given up: ",
    "replaced": "is another process than before",
}


class _Keeper:
    """What keepers of all kinds share. `name` and `member` can be read from any thread."""

    def __init__(self, name: str, care: Care) -> None:
        self.name = name
        self.member: Member | None = None
        self.closed = False
        self.settled = threading.Event()  # the first answer, or the first failure
        self.failure = ""  # the newest
        self._care = care
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"keep-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def suspect(self, member: Member, reason: str) -> None:
        self._orders.put(_Order("suspect", member.boot, reason=reason))

    def give_up(self, member: Member, reason: str) -> None:
        self._end(member.boot, _End("given_up", reason))

    def close(self) -> None:
        self.closed = True
        self.member = None
        self.settled.set()
        self._orders.put(_Order("close"))

    def _run(self) -> None:
        raise NotImplementedError

    def _admit(self, member: Member) -> None:
        with self._lock:
            if not self.closed:
                self.member = member
        self.settled.set()

    def _end(self, boot: str, end: _End) -> None:
        """From any thread; the first reason counts."""
        if self._withdraw(boot):
            self._orders.put(_Order("end", boot, end))

    def _withdraw(self, boot: str) -> bool:
        """Whether it was a member until now."""
        with self._lock:
            found = self.member is not None and self.member.boot == boot
            self.member = None if found else self.member
        return found

    def _pause(self, seconds: float) -> bool:
        """Whether to go on after it; other orders than to close are of the past by then."""
        deadline = time.monotonic() + seconds
        while not self.closed and (left := deadline - time.monotonic()) > 0:
            self._next_order(left)
        return not self.closed

    def _next_order(self, seconds: float) -> _Order | None:
        try:
            return self._orders.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None

    def _ask(self, probe: Probe, reason: str) -> Identity | ServerError | None:
        """The outcome of one probe; None where it does not count. `reason` of a suspicion, if there
        is one: then it has to generate for us as well."""
        care, mark = self._care, self._care.hold.mark()
        if mark is None:
            return None
        limit = care.probe_timeout_s * (_GENEROUS if reason else 1)
        outcome: Identity | ServerError
        try:
            outcome = probe.check(limit, token=bool(reason))
        except ServerError as error:
            outcome = error
        return outcome if care.hold.mark() == mark and not self.closed else None

    def _watch(self, member: Member, identity: Identity | None = None) -> _End:
        """Probes a member until it is none any more. `identity`: what it is known to be; another
        one means another process."""
        probe = Probe(member.url, self._care.key)
        suspicion, failures, wait_s = "", 0, self._care.probe_every_s
        while True:
            order = self._next_order(wait_s)
            if self.closed or (order and order.kind == "close"):
                return _End("closed")
            if order is not None and order.boot == member.boot:
                if order.end is not None:
                    return order.end
                log.info("%s is suspected: %s", self.name, order.reason)
                suspicion = order.reason
            outcome = self._ask(probe, suspicion)
            if outcome is None:
                wait_s = min(_AGAIN_S, self._care.probe_every_s)
            elif isinstance(outcome, ServerError):
                failures += 1
                log.warning("%s: probe %d of 2 failed: %s", self.name, failures, outcome)
                if failures == 2:
                    why = f"{outcome}" + (f" ({suspicion})" if suspicion else "")
                    return _End("hung", why)
                wait_s = _AGAIN_S
            else:
                if identity is not None and not identity.same_process(outcome):
                    return _End("replaced")
                suspicion, failures, wait_s = "", 0, self._care.probe_every_s


class ManagedKeeper(_Keeper):
    """A server that is started here, and started again."""

    def __init__(self, name: str, care: Care, starter: Starter, index: int, label: str) -> None:
        super().__init__(name, care)
        self.final = ""  # why it is not started any more
        self.server: ManagedServer | None = None
        self._starter, self._index, self._label = starter, index, label
        self._restarts = 0

    def close(self) -> None:
        """Ends the server."""
        super().close()
        with self._lock:  # nothing is spawned after this
            server = self.server
        if server is not None:
            server.stop()
            self._starter.withdraw(self._label)

    def signal(self, number: signal.Signals) -> None:
        """To the server, which is not started again: `close` is to follow."""
        self.closed = True
        with self._lock:
            server = self.server
        if server is not None:
            server.signal_group(number)

    def _run(self) -> None:
        failures = 0
        while not self.closed:
            begun = time.monotonic()
            cause = self._life()
            if self.closed:
                return
            failures = 1 if time.monotonic() - begun > _WELL_S else failures + 1
            self.failure = cause
            if not self._goes_on(cause, failures):
                return

    def _life(self) -> str:
        """From the start of a process to its end; returns why it ended."""
        mark = f"restart {self._restarts}" if self._restarts else "start"
        try:
            server, member = self._starter.start(
                self._index, self._label, mark=mark, spawned=self._spawned, ended=self._ended
            )
        except Exception as error:  # whatever keeps it from starting, its keeper must go on
            return str(error)
        self._admit(member)
        end = _End("died")
        if server.running:  # else it ended too early for its watcher to withdraw it
            end = self._watch(member)
        self._withdraw(member.boot)
        if end.kind == "closed":
            return ""
        died = not server.running
        self._care.events["died" if died else end.kind] += 1
        if not died:
            server.signal_group(signal.SIGKILL)
            server.wait(_KILL_S)
        self._starter.withdraw(self._label)
        return server.cause() if died else f"{end}; {server.last_words()}"

    def _spawned(self, server: ManagedServer) -> None:
        with self._lock:
            self.server = server
            closed = self.closed
        if closed:
            server.stop()

    def _ended(self, server: ManagedServer) -> None:
        if server is self.server and (member := self.member) is not None:
            self._end(member.boot, _End("died"))

    def _goes_on(self, cause: str, failures: int) -> bool:
        """Says what happens next; whether the server is started again, after a pause."""
        care = self._care
        if not care.restart:
            self.final = cause
            was_up = self.settled.is_set()
            self.settled.set()
            log.error("%s: %s; not started again (on_failure.servers=stop)", self.name, cause)
            if was_up:  # else whoever waits for the start reports it
                care.report(ServerDeath(self.name, cause))
            return False
        if self._restarts >= care.max_restarts:
            self.final = cause
            self.settled.set()
            log.error(
                "%s: %s; not started again: %d restarts are used up (on_failure.max_restarts)",
                *(self.name, cause, self._restarts),
            )
            return False
        self.settled.set()
        self._restarts += 1
        care.events["restarts"] += 1
        first, most = _BACK_OFF_S
        pause = min(most, first * 2 ** (failures - 1))
        log.error(
            "%s: %s; started again in %g s, %d restarts left",
            *(self.name, cause, pause, care.max_restarts - self._restarts),
        )
        return self._pause(pause)


class NamedKeeper(_Keeper):
    """A server that runs by itself: a member while it answers."""

    def __init__(
        self,
        name: str,
        url: str,
        care: Care,
        *,
        boot: str = "",
        ranks: int = 1,
        disown: Callable[[str, str], None] | None = None,
    ) -> None:
        """`boot`: of its present process, where that is known. `disown`: tells who has started it
        that this boot is of no use, and why.
        """
        super().__init__(name, care)
        self.url, self.boot = url, boot
        self._ranks, self._disown = ranks, disown
        self._given_up = 0

    def _run(self) -> None:
        probe, boot, told = Probe(self.url, self._care.key), self.boot, ""
        while not self.closed:
            found = self._ask(probe, "")
            if found is None:
                self._pause(_AGAIN_S)
                continue
            if isinstance(found, Identity):
                found = self._serve(found, boot or uuid.uuid4().hex[:12])
                boot = f"{self.boot}-{uuid.uuid4().hex[:6]}" if self.boot else ""
            if self.closed:
                return
            self.failure = str(found)
            self.settled.set()
            if self.failure != told:
                told = self.failure
                log.warning("%s: %s; left out until it answers", self.name, told)
            self._pause(min(1.0, self._care.probe_every_s))

    def _serve(self, identity: Identity, boot: str) -> ServerError:
        """While it answers; then why it does not."""
        try:
            features_of(identity.version)
        except ServerError as error:
            return error
        member = Member(self.name, self.url, boot, self._ranks, identity.version)
        self._admit(member)
        self._care.say(f"{self.name}: {self.url} ({identity.version})")
        end = self._watch(member, identity)
        self._withdraw(boot)
        care = self._care
        if end.kind in ("hung", "given_up"):
            care.events[end.kind] += 1
            if self._disown is not None:
                self._disown(self.boot, end.reason)
        if end.kind == "hung" and not care.restart:
            care.report(ServerDeath(self.name, str(end)))
        if end.kind == "given_up":
            self._given_up += 1
            self._pause(min(_BACK_OFF_S[1], 2.0 ** min(self._given_up, 10)))
        return ServerError(f"{self.url} {end}")

    def moved(self, boot: object, url: object, ranks: object) -> bool:
        """Whether another process is told of under this name, or none."""
        return (boot, url, ranks) != (self.boot, self.url, self._ranks)
