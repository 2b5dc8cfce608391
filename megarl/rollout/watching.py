"""What keepers of servers of all kinds do (`keeper.py`): a thread for each server, which watches
over it and says whether it may be asked.

1. A server is a member from the answer to its first probe until it ends, is given up, or leaves
   two probes in a row unanswered, or answers them with garbage. One failed probe is only a reason
   to ask again at once.
2. A boot that was withdrawn never comes back: whoever returns is a new one, since it may have
   missed weights meanwhile.
3. Nothing that was asked before or inside a `Hold` counts: servers pause while weights arrive.
4. Outside of one nobody has a reason to pause: a trainer that was killed in a push has left it so.
   Before the probe that decides, the server is told to go on.
"""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

from megarl.errors import ServerError
from megarl.rollout.probe import Identity, Probe, WrongAnswerError
from megarl.types import Member

log = logging.getLogger(__name__)

AGAIN_S = 0.5  # before the second probe, where the first was refused rather than left waiting
GENEROUS = 4  # a token of our own waits behind the others' requests


@dataclass(frozen=True)
class ServerDeath:
    """A server that ended, or hangs, without being told to."""

    name: str
    cause: str  # "exit code 3", "signal SIGKILL", "hangs: ...", with the end of its log

    def __str__(self) -> str:
        return f"{self.name} died: {self.cause}"


class Hold:
    """Spans of time in which nobody is probed; they may overlap."""

    def __init__(
        self, free: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True)
    ) -> None:
        """`free`: whether other processes leave room for `outside`, and do so inside of it."""
        self._free = free
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

    def outside(self, act: Callable[[], None]) -> None:
        """Does it unless a hold is on; none begins before it is done."""
        with self._lock:
            if not self._open:
                with self._free() as free:
                    if free:
                        act()


@dataclass
class Care:
    """How servers are watched over."""

    key: str
    probe_every_s: float
    probe_timeout_s: float
    restart: bool
    max_restarts: int
    longest: int  # tokens of a prompt and its response: whoever takes less is of no use
    report: Callable[[ServerDeath], None]  # of what ends the run
    say: Callable[[str], None]
    hold: Hold = field(default_factory=Hold)
    events: Counter[str] = field(default_factory=Counter)  # restarts and what `End` knows
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, event: str) -> None:
        with self._lock:
            self.events[event] += 1


@dataclass(frozen=True)
class _Order:
    kind: Literal["suspect", "end", "close"]
    boot: str = ""
    end: "End | None" = None
    reason: str = ""


@dataclass(frozen=True)
class End:
    """Why a server is no member any more; `kind` is what it counts as in `Care.events`."""

    kind: Literal["closed", "died", "hung", "garbled", "given_up", "replaced"]
    reason: str = ""

    def __str__(self) -> str:
        return _WORDS[self.kind] + self.reason


_WORDS = {
    "closed": "closed",
    "died": "died",
    "hung": "hangs: ",
    "garbled": "answers garbage: ",
    "given_up": "given up: ",
    "replaced": "is another process than before",
}


class Keeper(ABC):
    """What keepers of all kinds share. `name` and `member` can be read from any thread."""

    def __init__(self, name: str, care: Care) -> None:
        self.name = name
        self.member: Member | None = None
        self.closed = False
        self.settled = threading.Event()  # the first answer, or the first failure
        self.failure = ""  # the newest
        self.unfit = False  # that one: it answered, and cannot be used as it is
        self._care = care
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._pushed: int | None = None  # the weights that the member got last, since it is one
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"keep-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def suspect(self, member: Member, reason: str) -> None:
        self._orders.put(_Order("suspect", member.boot, reason=reason))

    def give_up(self, member: Member, reason: str) -> None:
        self._finish(member.boot, End("given_up", reason))

    def pushed(self, member: Member, version: int) -> None:
        with self._lock:
            if self.member == member:
                self._pushed = version

    def close(self, grace_s: float = 0.0) -> None:
        """`grace_s`: for what is ended, before it is killed."""
        self.closed = True
        self.member = None
        self.settled.set()
        self._orders.put(_Order("close"))

    @abstractmethod
    def _run(self) -> None:
        """In the keeper's thread, until it is closed."""

    def _admit(self, member: Member) -> None:
        with self._lock:
            if not self.closed:
                self.member, self._pushed = member, None
        self.settled.set()

    def _finish(self, boot: str, end: End) -> None:
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
        limit = care.probe_timeout_s
        outcome: Identity | ServerError
        try:
            outcome = probe.check(limit, token_timeout_s=GENEROUS * limit if reason else None)
        except ServerError as error:
            outcome = error
        return outcome if care.hold.mark() == mark and not self.closed else None

    def _watch(self, member: Member, identity: Identity | None = None) -> End:
        """Probes a member until it is none any more. `identity`: what it is known to be; another
        one means another process."""
        probe = Probe(member.url, self._care.key)
        suspicion, failures, wait_s = "", 0, self._care.probe_every_s
        while True:
            end, reason = self._orders_for(member, wait_s)
            if end is not None:
                return end
            if reason and not suspicion:
                log.info("%s is suspected: %s", self.name, reason)
            suspicion = reason or suspicion
            outcome = self._ask(probe, suspicion)
            if outcome is None:
                failures = 0
                wait_s = min(AGAIN_S, self._care.probe_every_s)
            elif isinstance(outcome, ServerError):
                failures += 1
                log.warning("%s: probe %d of 2 failed: %s", self.name, failures, outcome)
                if failures == 2:
                    why = f"{outcome}" + (f" ({suspicion})" if suspicion else "")
                    garbled = isinstance(outcome, WrongAnswerError)
                    return End("garbled" if garbled else "hung", why)
                self._care.hold.outside(probe.resume)
                wait_s = AGAIN_S
            else:
                if identity is not None and not self._is_still(identity, outcome):
                    return End("replaced")
                if failures:
                    log.info("%s answers again", self.name)
                suspicion, failures, wait_s = "", 0, self._care.probe_every_s

    def _is_still(self, known: Identity, found: Identity) -> bool:
        pushed = self._pushed  # inside a hold: what counts was asked after it
        return (known if pushed is None else replace(known, weights=pushed)).same_process(found)

    def _orders_for(self, member: Member, wait_s: float) -> tuple[End | None, str]:
        """(why it ends, why it is suspected), of all orders that have come; waits for the first."""
        reason, order = "", self._next_order(wait_s)
        while order is not None and not self.closed:
            if order.boot == member.boot:
                if order.end is not None:
                    return order.end, reason
                reason = order.reason
            order = self._next_order(0.0)
        return (End("closed") if self.closed else None), reason
