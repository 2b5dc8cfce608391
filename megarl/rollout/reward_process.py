"""Rewards in a process of their own, which can be killed: they are anybody's code.

    collector's process --- control ---> keeper, which forks and ends ---> scoring process
         grade() <------------- a socket a scoring process: texts, rewards -------->

1. The keeper is forked from the collector's process before that has threads, and never runs a
   reward. A socket that comes over `control` is of a new scoring process; the one before is killed.
2. Scoring takes bounded time: a response that takes longer than `data.reward_timeout_s`, or ends
   the process, fails its group (`UnscoredError`), and a new process scores the next one.
3. Nothing outlives the collector's process, however that ends: `control` is closed then, and the
   keeper kills every descendant, also those that lead sessions of their own, before it ends. Only
   who kills the keeper, too, leaves what rewards have started.
"""

import contextlib
import io
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megarl.data.rewards import load_reward, score
from megarl.errors import MegarlError, RunError
from megarl.rollout.frames import Array, make_frame, receive_frame, send_frame
from megarl.rollout.messages import Json, error_from_json, error_to_json
from megarl.rollout.process import die_with_parent, keep_orphans
from megarl.types import Scored

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0
_END_S = 5.0  # until what was killed is gone
_MOST_NAME = 4096  # bytes of a reward's name


class UnscoredError(MegarlError):
    """A response cannot be scored, and nothing is wrong with any other."""


class RewardProcess:
    """The scoring process as the collector's process sees it; one thread may use it."""

    def __init__(self, control: socket.socket, name: str, timeout_s: float) -> None:
        """Starts to load the reward, and returns. `control`: of `start_keeper`."""
        self._control, self._name, self._timeout_s = control, name, timeout_s
        self._connection = self._start()
        self._ready = False

    def wait_ready(self) -> None:
        """Raises ConfigError for a name that leads nowhere, RunError where loading ends or never
        does.
        """
        if self._ready:
            return
        self._connection.settimeout(_LOAD_TIMEOUT_S)
        try:
            self._hear()
        except TimeoutError as error:
            text = f"data.reward={self._name} was not loaded within {_LOAD_TIMEOUT_S:g} s"
            raise RunError(text) from error
        except (OSError, EOFError) as error:
            raise RunError(f"data.reward={self._name} ended the process that loaded it") from error
        self._ready = True
        self._connection.settimeout(self._timeout_s)

    def grade(
        self, responses: Sequence[tuple[str, str]], payload: Mapping[str, Any]
    ) -> list[Scored]:
        """Of (name, text) of whole responses to one prompt. Raises DataError as `score` does, and
        UnscoredError.
        """
        if not responses:
            return []
        self.wait_ready()
        scored: list[Scored] = []
        try:
            self._say({"responses": responses, "payload": payload})
            for _ in responses:
                components, correct, steps = self._hear()["scored"]
                scored.append(Scored(components, correct, [(end, value) for end, value in steps]))
        except (OSError, EOFError) as error:  # a TimeoutError is an OSError
            self._connection.close()
            self._ready, self._connection = False, self._start()
            late = f"took longer than {self._timeout_s:g} s (data.reward_timeout_s)"
            how = late if isinstance(error, TimeoutError) else "ended its process"
            which = responses[min(len(scored), len(responses) - 1)][0]
            raise UnscoredError(f"data.reward={self._name} {how} on sample {which}") from error
        return scored

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [self._name.encode()], [theirs.fileno()])
            except OSError as error:
                raise RunError("the keeper of the reward's process is gone") from error
        return ours

    def _say(self, message: Json) -> None:
        send_frame(self._connection, make_frame(message))

    def _hear(self) -> Json:
        frame: tuple[Json, list[Array]] | None = receive_frame(self._connection)
        if frame is None:
            raise EOFError("nobody is there any more")
        if "error" in frame[0]:
            raise error_from_json(frame[0]["error"])
        return frame[0]


@contextlib.contextmanager
def keeper(foreign: Sequence[int] = ()) -> Iterator[socket.socket]:
    """Forks the keeper: call it while there is no other thread. Gives the socket `control`; the
    keeper has ended, and everything with it, when the block has. `foreign`: descriptors that are
    none of its business.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        for descriptor in (*foreign, ours.detach()):
            os.close(descriptor)
        _as_process(_keep, theirs)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


def _as_process(work: Callable[..., None], *arguments: Any) -> NoReturn:
    """What a forked process does, and nothing of what its parent would have done at its end."""
    code = 1
    try:
        # Handlers, where ignored signals would be ignored by what rewards start, too.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        work(*arguments)
        code = 0
    except BaseException:
        log.exception("%s ended", work.__name__)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


# ---- the keeper ----------------------------------------------------------------------------------


def _keep(control: socket.socket) -> None:
    keep_orphans()
    while True:
        name, descriptors, _, _ = socket.recv_fds(control, _MOST_NAME, 1)
        _end_descendants()
        if not name:
            return
        connection = socket.socket(fileno=descriptors[0])
        parent = os.getpid()
        if os.fork() == 0:
            control.close()
            die_with_parent(parent)
            _as_process(_score_all, connection, name.decode())
        connection.close()


def _end_descendants() -> None:
    """Kills and reaps them, until there are none or for a time."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not _descendants(os.getpid()):
            return
        time.sleep(0.01)
    log.error("of what rewards have started some did not end: %s", _descendants(os.getpid()))


def _descendants(of: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found, ahead = list[int](), [of]
    while ahead:
        ahead = [child for pid in ahead for child in children.get(pid, [])]
        found += ahead
    return found


# ---- the scoring process -------------------------------------------------------------------------


def _score_all(connection: socket.socket, name: str) -> None:
    """Answers every response of every message; of a message with an error nothing beyond it."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a reward printed before it was killed
    try:
        reward = load_reward(name)
    except MegarlError as error:
        send_frame(connection, make_frame({"error": error_to_json(error)}))
        return
    send_frame(connection, make_frame({"ready": os.getpid()}))
    while (frame := receive_frame(connection)) is not None:
        message = frame[0]
        for sample, text in message["responses"]:
            try:
                found = score(reward, text, message["payload"], finished=True, sample=sample)
                told: Json = {"scored": [dict(found.components), found.correct, found.steps]}
            except MegarlError as error:
                told = {"error": error_to_json(error)}
            send_frame(connection, make_frame(told))
            if "error" in told:
                break
