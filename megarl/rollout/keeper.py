"""Keepers of servers that are started here, and of those that run by themselves."""

import logging
import signal
import time
import uuid
from collections.abc import Callable

from megarl.errors import ServerError, UnfitServerError
from megarl.rollout.features import require_length, require_plugin
from megarl.rollout.managed import TERM_S, ManagedServer
from megarl.rollout.probe import Identity, Probe
from megarl.rollout.starter import Starter
from megarl.rollout.watching import AGAIN_S, Care, End, Keeper, ServerDeath
from megarl.types import Member

log = logging.getLogger(__name__)

_BACK_OFF_S = (1.0, 60.0)  # after the first failure, and at most
_WELL_S = 300.0  # a server that has served for so long starts its back-off anew
_KILL_S = 10.0


class ManagedKeeper(Keeper):
    """A server that is started here, and started again."""

    def __init__(self, name: str, care: Care, starter: Starter, index: int, label: str) -> None:
        super().__init__(name, care)
        self.final = ""  # why it is not started any more
        self.server: ManagedServer | None = None
        self._starter, self._index, self._label = starter, index, label
        self._restarts = 0

    def close(self, grace_s: float = TERM_S) -> None:
        """Ends the server."""
        super().close()
        with self._lock:  # nothing is spawned after this
            server = self.server
        if server is not None:
            server.stop(grace_s)
            self._starter.withdraw(self._label)

    def signal(self, number: signal.Signals) -> None:
        """To the server, which is not started again: `close` is to follow."""
        self.closed = True
        with self._lock:
            server = self.server
        if server is not None:
            server.signal_group(number)

    def _run(self) -> None:
        failures, goes_on = 0, True
        while goes_on and not self.closed:
            begun = time.monotonic()
            cause = self._life()
            if self.closed:
                self._starter.withdraw(self._label)  # it may have been told of meanwhile
                return
            failures = 1 if time.monotonic() - begun > _WELL_S else failures + 1
            self.failure = cause
            goes_on = self._goes_on(cause, failures)

    def _life(self) -> str:
        """From the start of a process to its end; returns why it ended, first in short."""
        mark = f"restart {self._restarts}" if self._restarts else "start"
        try:
            server, member = self._starter.start(
                self._index, self._label, mark=mark, spawned=self._spawned, ended=self._ended
            )
        except Exception as error:  # whatever keeps it from starting, its keeper must go on
            self.unfit = isinstance(error, UnfitServerError)
            return str(error)
        self._admit(member)
        end = End("died")
        if server.running:  # else it ended too early for its watcher to withdraw it
            end = self._watch(member)
        self._withdraw(member.boot)
        if end.kind == "closed":
            return ""
        died = not server.running
        self._care.count("died" if died else end.kind)
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
            self._finish(member.boot, End("died"))

    def _goes_on(self, cause: str, failures: int) -> bool:
        """Says what happens next; whether the server is started again, after a pause."""
        care, (short, _, words) = self._care, cause.partition("\n")
        was_up = self.settled.is_set()
        self.settled.set()
        left = care.max_restarts - self._restarts if care.restart and not self.unfit else 0
        if left <= 0:
            self.final = cause
            why = f"{self._restarts} restarts are used up" if care.restart else "on_failure is stop"
            why = "it would be the same" if self.unfit else why
            log.error("%s: %s; not started again: %s\n%s", self.name, short, why, words)
            if was_up and not care.restart:  # else whoever waits for the start reports it
                care.report(ServerDeath(self.name, cause))
            return False
        self._restarts += 1
        care.count("restarts")
        first, most = _BACK_OFF_S
        pause = min(most, first * 2 ** (failures - 1))
        log.error(
            "%s: %s; started again in %g s, %d restarts left after that\n%s",
            *(self.name, short, pause, left - 1, words),
        )
        return self._pause(pause)


class NamedKeeper(Keeper):
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
                self._pause(AGAIN_S)
                continue
            if isinstance(found, ServerError):
                self._care.hold.outside(probe.resume)
            else:
                found = self._serve(found, boot or uuid.uuid4().hex[:12])
                boot = f"{self.boot}-{uuid.uuid4().hex[:6]}" if self.boot else ""
            if self.closed:
                return
            self.unfit = isinstance(found, UnfitServerError)
            self.failure = str(found)
            self.settled.set()
            if self.failure != told:
                told = self.failure
                log.warning("%s: %s; left out until it answers", self.name, told)
            self._pause(min(1.0, self._care.probe_every_s))

    def _serve(self, identity: Identity, boot: str) -> ServerError:
        """While it answers; then why it does not."""
        try:
            require_plugin(identity.version, identity.plugin)
            require_length(identity.longest, self._care.longest)
        except UnfitServerError as error:
            return UnfitServerError(f"{self.url}: {error}")
        if identity.ranks not in (None, self._ranks):
            found = f"found {self._ranks}; accepted: {identity.ranks}, as the server says"
            return UnfitServerError(f"{self.url}: rollout.server_tp: {found}")
        member = Member(self.name, self.url, boot, self._ranks, identity.version)
        self._admit(member)
        self._care.say(f"{self.name}: {self.url} ({identity.version})")
        end = self._watch(member, identity)
        self._withdraw(boot)
        care = self._care
        if end.kind != "closed":
            care.count(end.kind)
        fails = end.kind in ("hung", "garbled")
        if (fails or end.kind == "given_up") and self._disown is not None:
            self._disown(self.boot, end.reason)
        if fails and not care.restart:
            care.report(ServerDeath(self.name, str(end)))
        if end.kind == "given_up":
            self._given_up += 1
            self._pause(min(_BACK_OFF_S[1], 2.0 ** min(self._given_up, 10)))
        return ServerError(f"{self.url} {end}")

    def moved(self, boot: object, url: object, ranks: object) -> bool:
        """Whether another process is told of under this name, or none."""
        return (boot, url, ranks) != (self.boot, self.url, self._ranks)
