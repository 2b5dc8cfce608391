"""`megarl servers`: the managed servers of a run, by a process of their own.

They outlive a restart of the trainer, and may run on another machine: trainers with
`rollout.discover` find them in the run directory (`discovery.py`). Several supervisors may serve
one run. It ends, and its servers with it, on SIGTERM or Ctrl-C, when the process `parent_pid` ends,
and when no server can be started any more.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megarl.config.rollout import RolloutSection
from megarl.errors import ServerError
from megarl.rollout.fleet import Fleet, start_fleet
from megarl.rollout.mailbox import HoldWatch, asked_for_another
from megarl.rollout.process import follow_parent
from megarl.rollout.watching import Hold
from megarl.rundir import RunDir

log = logging.getLogger(__name__)

_POLL_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Told(BaseException):
    """To end, while something else was done."""


def supervise(
    section: RolloutSection,
    *,
    run_dir: RunDir,
    model: Path,
    dtype: str,
    host: str,
    routing: bool,
    max_restarts: int,
    parent_pid: int | None = None,
) -> None:
    """Returns once it was told to end. Call it from the main thread. Raises ServerError when no
    server is left.
    """
    if parent_pid is not None:
        follow_parent(parent_pid, lambda: os.kill(os.getpid(), signal.SIGTERM))

    def told(number: int, frame: object) -> None:
        for known in _SIGNALS:
            signal.signal(known, signal.SIG_IGN)  # it ends within seconds, undisturbed
        raise _Told

    for number in _SIGNALS:
        signal.signal(number, told)
    if parent_pid is not None:  # which gets Ctrl-C as well, and still needs the servers
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    name = socket.gethostname()
    labels = [f"{name}-{index}" for index in range(section.servers)]
    watch = HoldWatch(run_dir)
    try:
        fleet = start_fleet(
            # The router is the trainer's, who tells it who serves.
            section.model_copy(update={"discover": False, "router_command": ()}),
            run_dir=run_dir,
            model=model,
            dtype=dtype,
            on_death=lambda death: None,
            host=host,
            routing=routing,
            on_failure="restart",
            max_restarts=max_restarts,
            labels=labels,
            hold=Hold(watch.left),
        )
        try:
            _watch(fleet, run_dir, labels, watch)
        finally:
            fleet.close()
    except _Told:
        log.info("told to end: the servers have ended")


def _watch(fleet: Fleet, run_dir: RunDir, labels: Sequence[str], watch: HoldWatch) -> None:
    """Does what trainers ask for, until there is nothing left to do."""
    held = False
    with ExitStack() as holds:
        while (trouble := fleet.trouble()) is None:
            if (on := watch.on()) != held:
                held = on
                holds.enter_context(fleet.hold()) if on else holds.close()
            for label in labels:
                _give_up(fleet, label, asked_for_another(run_dir, label))
            time.sleep(_POLL_S)
    raise ServerError(trouble)


def _give_up(fleet: Fleet, label: str, asked: tuple[str, str] | None) -> None:
    if asked is None:
        return
    boot, reason = asked
    for member in fleet.members():
        if member.name == f"server {label}" and member.boot == boot:
            fleet.give_up(member, f"a trainer asked for it: {reason}")
