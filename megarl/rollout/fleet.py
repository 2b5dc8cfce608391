"""The rollout servers of a run: `protocols.Fleet` of servers that are started here, named
(`rollout.urls`) or discovered (`rollout.discover`).

Each has a keeper (`keeper.py`), which probes it and starts it again, or waits for it to come back.
"""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megarl.config.rollout import Choice, RolloutSection
from megarl.config.rollout_rules import server_args_problems
from megarl.errors import ConfigError, Problem, ServerError, UnfitServerError
from megarl.rollout.control import ServerControl
from megarl.rollout.discovery import Discovery
from megarl.rollout.keeper import ManagedKeeper, NamedKeeper
from megarl.rollout.managed import TERM_S, ManagedServer
from megarl.rollout.process import LOOPBACK, read_key, read_or_make_key
from megarl.rollout.router import Router
from megarl.rollout.starter import EMBEDDED_COMMAND, Starter
from megarl.rollout.watching import Care, Hold, ServerDeath
from megarl.rundir import RunDir
from megarl.types import Member

__all__ = ["Fleet", "ServerDeath", "start_fleet"]
log = logging.getLogger(__name__)

Keeper = ManagedKeeper | NamedKeeper
_POLL_S = 0.05


class Fleet:
    """The servers that answer, and how to reach them. Safe to call from any thread."""

    def __init__(
        self, key: str, care: Care, keepers: Sequence[Keeper], discovery: Discovery | None = None
    ) -> None:
        self.key = key
        self.router: Router | None = None  # asked instead of the members, where there is one
        self._care, self._discovery = care, discovery
        self._fixed = list(keepers)

    def start(self) -> None:
        for keeper in self._fixed:
            keeper.start()

    @property
    def keepers(self) -> list[Keeper]:
        return [*self._fixed, *(self._discovery.keepers() if self._discovery else ())]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(member.url for member in self.members())

    @property
    def managed(self) -> tuple[ManagedServer, ...]:
        """The present processes of those that are started here."""
        servers = (k.server for k in self._fixed if isinstance(k, ManagedKeeper))
        return tuple(server for server in servers if server is not None)

    @property
    def events(self) -> dict[str, int]:
        """Counted since the start: restarts, died, hung, garbled, given_up, replaced."""
        return dict(self._care.events)

    def members(self) -> list[Member]:
        found = [keeper.member for keeper in self.keepers]
        return [member for member in found if member is not None]

    def suspect(self, member: Member, reason: str) -> None:
        """Behind a router it may be any."""
        routed = self.router is not None and member == self.router.member()
        for suspected in self.members() if routed else [member]:
            for keeper in self._of(suspected):
                keeper.suspect(suspected, reason)

    def give_up(self, member: Member, reason: str) -> None:
        for keeper in self._of(member):
            keeper.give_up(member, reason)

    def pushed(self, members: Sequence[Member], version: int) -> None:
        for member in members:
            for keeper in self._of(member):
                keeper.pushed(member, version)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Supervisors of discovered servers are told."""
        elsewhere = self._discovery.hold() if self._discovery else nullcontext()
        with self._care.hold(), elsewhere:
            yield

    def trouble(self) -> str | None:
        """Named and discovered servers may always come back."""
        final = [keeper.final for keeper in self._fixed if isinstance(keeper, ManagedKeeper)]
        if not final or len(final) < len(self._fixed) or not all(final):
            return None
        told = [f"{k.name}: {why}" for k, why in zip(self._fixed, final, strict=True)]
        return "no rollout server is left, and none is started any more:\n" + "\n".join(told)

    def controls(self) -> list[ServerControl]:
        """One WeightSink a member."""
        return [
            ServerControl(m.url, self.key, m.name, ranks=m.ranks, boot=m.boot, version=m.version)
            for m in self.members()
        ]

    def close(self) -> None:
        """Ends the managed servers, all at once, and the router; others are left alone."""
        if self.router is not None:
            self.router.close()
        if self._discovery is not None:
            self._discovery.close()
        for keeper in self._fixed:
            if isinstance(keeper, ManagedKeeper):
                keeper.signal(signal.SIGTERM)
        deadline = time.monotonic() + TERM_S
        for keeper in self._fixed:
            keeper.close(max(0.0, deadline - time.monotonic()))

    def _of(self, member: Member) -> list[Keeper]:
        return [keeper for keeper in self.keepers if keeper.name == member.name]


def start_fleet(
    section: RolloutSection,
    *,
    run_dir: RunDir,
    model: Path,
    dtype: str,
    on_death: Callable[[ServerDeath], None],
    host: str = LOOPBACK,
    routing: bool = False,
    on_failure: Choice = "stop",
    max_restarts: int = 0,
    progress: Callable[[str], None] = lambda text: None,
    labels: Sequence[str] | None = None,
    embedded_command: Sequence[str] = EMBEDDED_COMMAND,
    hold: Hold | None = None,
) -> Fleet:
    """Servers of which at least one answers, within `rollout.start_timeout_s`; all of them, where
    a failing one is not started again (`on_failure`: stop).

    `model`: the Hugging Face folder; `dtype`: fp32 or bf16. Managed servers listen on `host`
    alone, an address of this machine. `routing`: they can say which experts tokens were routed to.
    `labels`: what the files of managed servers are called by; default: their numbers. `on_death` is
    called, from a thread, for a server that ends the run. `progress` is told what happens
    meanwhile, and so is the log. `hold`: where other processes push weights as well.
    Raises ServerError with the ends of the logs, UnfitServerError at once for servers that answer
    and cannot be used, ConfigError when the settings lack something.
    """
    _require_settings(section)
    key_file = section.key_file or run_dir.key
    key = read_key(key_file) if section.key_file else read_or_make_key(key_file)

    def say(text: str) -> None:
        log.info("%s", text)
        progress(text)

    care = Care(
        key=key,
        probe_every_s=section.probe_every_s,
        probe_timeout_s=section.probe_timeout_s,
        restart=on_failure == "restart" or section.discover,
        max_restarts=max_restarts,
        longest=section.context_length,
        report=on_death,
        say=say,
        hold=hold or Hold(),
    )
    starter = Starter(
        *(section, run_dir, model, dtype, key_file, key, host, routing, say),
        tuple(embedded_command),
    )
    discovery = Discovery(run_dir, care) if section.discover else None
    fleet = Fleet(key, care, _keepers(section, care, starter, labels), discovery)
    try:
        fleet.start()
        fleet.router = _router(starter, max_restarts if care.restart else 0, on_death)
        _await_first(fleet, section, run_dir, all_of_them=not care.restart)
    except BaseException:
        fleet.close()
        raise
    return fleet


def _keepers(
    section: RolloutSection, care: Care, starter: Starter, labels: Sequence[str] | None
) -> Sequence[Keeper]:
    """Of the servers that are known from the start."""
    if section.discover:
        return []
    if section.urls:
        return [NamedKeeper(url, url, care, ranks=section.server_tp) for url in section.urls]
    labels = labels or [str(index) for index in range(section.servers)]
    return [ManagedKeeper(f"server {k}", care, starter, i, k) for i, k in enumerate(labels)]


def _router(of: Starter, max_restarts: int, report: Callable[[ServerDeath], None]) -> Router | None:
    section = of.section
    if not section.router_command:
        return None
    return Router(
        section.router_command,
        run_dir=of.run_dir,
        key=of.key,
        key_file=of.key_file,
        host=of.host,
        timeout_s=section.start_timeout_s,
        request_timeout_s=section.request_timeout_s,
        max_restarts=max_restarts,
        say=of.progress,
        report=report,
    )


def _await_first(
    fleet: Fleet, section: RolloutSection, run_dir: RunDir, *, all_of_them: bool
) -> None:
    """Until every server has answered or failed once, and one, or all, have answered."""
    deadline = time.monotonic() + section.start_timeout_s
    waited = f"{section.start_timeout_s:g} s (rollout.start_timeout_s)"
    managed = not section.urls and not section.discover
    while True:
        keepers = fleet.keepers
        down = [keeper for keeper in keepers if keeper.member is None]
        settled = all(keeper.settled.is_set() for keeper in keepers) or section.discover
        if settled and keepers and (not down or (len(down) < len(keepers) and not all_of_them)):
            return
        failures = [keeper.failure for keeper in down if keeper.failure]
        unfit = [keeper.failure for keeper in down if keeper.failure and keeper.unfit]
        if unfit and not section.discover and (all_of_them or len(unfit) == len(keepers)):
            raise UnfitServerError("\n".join(unfit))  # waiting changes nothing
        if managed and failures and (all_of_them or len(failures) == len(keepers)):
            raise ServerError("\n".join(failures))
        if not managed and time.monotonic() > deadline:
            if section.discover and not keepers:
                raise ServerError(
                    f"no server has told its address in {run_dir.server('*')} within {waited}: "
                    "rollout.discover wants `megarl servers` to run for this run directory"
                )
            if len(down) < len(keepers) and not all_of_them:
                return
            told = "\n".join(failures) or "rollout servers have not answered"
            raise (UnfitServerError if unfit else ServerError)(f"{told} (waited {waited})")
        time.sleep(_POLL_S)


def _require_settings(section: RolloutSection) -> None:
    """What cannot be started. `config/` says so before, with everything else."""
    problems = list(server_args_problems(section))
    if section.urls and section.key_file is None:
        accepted = "the file with the key of the servers in rollout.urls"
        problems.append(Problem("rollout.key_file", "nothing", accepted))
    started = not section.urls and not section.discover
    if started and section.engine == "sglang" and not section.server_command:
        accepted = "the command that starts SGLang, e.g. [python, -m, sglang.launch_server]"
        problems.append(Problem("rollout.server_command", "nothing", accepted))
    if problems:
        raise ConfigError(problems)
