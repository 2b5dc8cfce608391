"""Which error came first: of a start's ``rank_N.json`` files, the one that explains the others.

When one rank fails, the others fail too, seconds later, because it no longer answers: connections
are reset, collectives time out, processes are told to end. Such follow-ups yield to real causes,
whatever the clocks of the nodes say; among equals the earliest counts.
"""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Never a cause of their own.
_ALWAYS = {
    "BrokenPipeError",
    "ConnectionAbortedError",
    "ConnectionResetError",
    "DistNetworkError",
    "KeyboardInterrupt",
    "SignalException",
}
# Causes, unless the message tells of a peer. Errors of servers, data and settings are not here.
_BY_MESSAGE = {
    "ConnectionError",
    "DistBackendError",
    "DistError",
    "DistStoreError",
    "OSError",
    "RunError",
    "RuntimeError",
    "TimeoutError",
}
_MESSAGE = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|closed by peer|broken pipe"
    r"|socket (was )?closed|remote process exited|unhandled system error|ncclRemoteError"
    r"|connectFullMesh|timed out waiting|wait timeout|watchdog|failed to recv"
    r"|peer.*(closed|gone|lost)|another rank|failed on rank \d+|sigterm|sigint",
    re.IGNORECASE,
)
# In torchrun's summary of failures.
_ENDED = re.compile(r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: (?P<code>-?\d+) ")
_REFUSED = 2  # of a rank: wrong settings or installation (train.py)


@dataclass(frozen=True)
class RankError:
    """The contents of one error file; ``where`` is the phase of the loop ("rollout", "step 12")."""

    time: float
    rank: int
    host: str
    where: str
    error: str
    message: str
    traceback: str = ""
    lasting: bool = False  # what a restart does not mend (errors.LASTING)

    @property
    def follows(self) -> bool:
        """Is it the kind that another process's failure causes?"""
        name = self.error.rpartition(".")[2]
        return name in _ALWAYS or (name in _BY_MESSAGE and bool(_MESSAGE.search(self.message)))


def read_errors(folder: Path) -> list[RankError]:
    """Every error file; one that cannot be read is an entry of its own rather than nothing."""
    return [_read(path) for path in sorted(folder.glob("rank_*.json"))]


def first_error(errors: Sequence[RankError]) -> RankError | None:
    return min(errors, key=lambda e: (e.follows, e.time, e.rank), default=None)


def killed_ranks(torchrun_logs: Sequence[str]) -> list[str]:
    """A line for every rank that a signal ended, other than torchrun's own SIGTERM to the rest."""
    return [
        f"rank {rank} was ended by signal {-code}"
        + (" (out of memory? see dmesg)" if -code == signal.SIGKILL else "")
        for rank, code in _exit_codes(torchrun_logs)
        if code < 0 and -code != signal.SIGTERM
    ]


def _exit_codes(torchrun_logs: Sequence[str]) -> list[tuple[int, int]]:
    """(rank, exit code) of those that failed."""
    found = (m for log in torchrun_logs for m in _ENDED.finditer(log))
    return sorted({(int(m["rank"]), int(m["code"])) for m in found})


@dataclass(frozen=True)
class Cause:
    """Why a start failed. ``text``: all that a person should read; ``name``: in a word or two."""

    text: str
    name: str
    lasting: bool  # a restart would meet it again


def cause_of(folder: Path, torchrun_logs: Sequence[str]) -> Cause | None:
    """By error files and by what torchrun said; None where neither tells of a failure."""
    errors = read_errors(folder)
    first = first_error(errors)
    killed = killed_ranks(torchrun_logs)
    if killed and (first is None or first.follows):  # whoever is killed cannot say so itself
        return Cause("\n".join(killed), "a signal", lasting=False)
    if first is not None:
        return Cause(message_of(first, errors), first.error, first.lasting)
    refused = [rank for rank, code in _exit_codes(torchrun_logs) if code == _REFUSED]
    if refused:  # it could not read which run directory is its own
        text = f"rank {refused[0]} has refused its settings or its installation"
        return Cause(text, f"exit code {_REFUSED}", lasting=True)
    return None


def message_of(first: RankError, errors: Sequence[RankError]) -> str:
    """The one message a person should read: what, where, the innermost frame, how many followed."""
    where = f" in {first.where}" if first.where else ""
    lines = [f"rank {first.rank} on {first.host or '?'} failed first{where}:"]
    lines.append(f"{first.error}: {first.message}" if first.message else first.error)
    frames = [x.strip() for x in first.traceback.splitlines() if x.strip().startswith("File ")]
    if frames:
        lines.append(f"at {frames[-1].removeprefix('File ')}")
    others = sorted(e.rank for e in errors if e is not first)
    if others:
        shown = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
        lines.append(f"({len(others)} more failed after it: rank {shown})")
    return "\n".join(lines)


def _read(path: Path) -> RankError:
    try:
        value = json.loads(path.read_text("utf-8"))
        return RankError(
            time=float(value["time"]),
            rank=int(value["rank"]),
            host=str(value.get("host", "")),
            where=str(value.get("where", "")),
            error=str(value["error"]),
            message=str(value.get("message", "")),
            traceback=str(value.get("traceback", "")),
            lasting=value.get("lasting") is True,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        number = int("".join(filter(str.isdigit, path.stem)) or -1)
        when = path.stat().st_mtime if path.exists() else 0.0
        return RankError(when, number, "", "", "an unreadable error file", f"{path}: {e!r}")
