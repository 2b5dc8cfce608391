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
_KILLED = re.compile(r"rank +: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode +: -(?P<signal>\d+) ")


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
    found = {
        (int(m["rank"]), int(m["signal"])) for log in torchrun_logs for m in _KILLED.finditer(log)
    }
    return [
        f"rank {rank} was ended by signal {number}"
        + (" (out of memory? see dmesg)" if number == signal.SIGKILL else "")
        for rank, number in sorted(found)
        if number != signal.SIGTERM
    ]


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
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        number = int("".join(filter(str.isdigit, path.stem)) or -1)
        when = path.stat().st_mtime if path.exists() else 0.0
        return RankError(when, number, "", "", "an unreadable error file", f"{path}: {e!r}")
