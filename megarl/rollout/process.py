"""What a server process and the one that starts it share: the key, and dying together."""

import contextlib
import ctypes
import logging
import os
import re
import secrets
import select
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megarl.errors import ConfigError, Problem

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
# What torchrun tells its workers is not for their children, which are no members of its world.
_OF_THE_JOB = re.compile(
    r"TORCHELASTIC_.*|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME"
)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.5


def read_or_make_key(path: Path) -> str:
    """The key in a file; a new one, for its owner only, where there is no file yet."""
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        try:
            os.link(part, path)  # whole or not at all, and never over an existing key
        finally:
            part.unlink()
    return read_key(path)


def read_key(path: Path) -> str:
    """Raises ConfigError when the file is missing or holds no usable key. SGLang and its router
    would take a key that begins with a dash for one of their flags."""
    accepted = "a file with one line of ASCII without spaces or a leading dash, the servers' key"
    if not path.is_file():
        raise ConfigError([Problem("rollout.key_file", str(path), accepted)])
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        log.warning("%s can be read by others; its mode should be 600", path)
    key = path.read_text().strip()
    if not key or not key.isascii() or any(c.isspace() for c in key) or key.startswith("-"):
        raise ConfigError([Problem("rollout.key_file", f"{path} without such a key", accepted)])
    return key


def child_environment() -> dict[str, str]:
    """This process's environment, without its place in a job."""
    return {k: v for k, v in os.environ.items() if not _OF_THE_JOB.fullmatch(k)}


def follow_parent(parent_pid: int, ended: Callable[[], None]) -> None:
    """Calls `ended` in a thread of its own once the process `parent_pid` has ended.

    By two means. The kernel can signal us, but it does so for the *thread* that started us, so the
    signal only makes us look; a thread that waits covers what the signal misses (a parent that died
    before this line, or one that is not our direct parent). Call it from the main thread.
    """
    look = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: look.set())
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)

    def watch() -> None:
        for _ in _ticks(parent_pid, look):
            if not lives(parent_pid):
                break
        ended()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def die_with_parent(parent_pid: int) -> None:
    """The kernel kills us when the thread that forked us, `parent_pid`'s only one, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def keep_orphans() -> None:
    """Descendants whose parents end become our children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def lives(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has waited for is dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _ticks(pid: int, look: threading.Event) -> Iterator[None]:
    """Yields now, every half second, and at once when the process ends (where the system can
    tell)."""
    yield
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        while True:
            look.wait(_POLL_S)
            look.clear()
            yield
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while True:
        if poller.poll(_POLL_S * 1000):
            time.sleep(0.01)  # it is a zombie from the next moment on
        yield
