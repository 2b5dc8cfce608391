"""A node's collector, as the trainer sees it (`protocols.Collector`).

The work is done by a process of its own (`collector_process.py`), so that neither JSON nor rewards
take time from training. It starts at once and imports while the trainer does other things; what
is asked of it meanwhile waits in its socket. Finished groups come back over that socket and are
read by a thread; their arrays are views of what was received.
"""

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from megarl.errors import MegarlError, RunError, ServerError
from megarl.rollout.frames import Array, Frame, make_frame, receive_frame, send_frame
from megarl.rollout.messages import (
    CollectorSettings,
    Json,
    error_from_json,
    error_to_json,
    member_from_json,
    outcome_from_frame,
    request_to_json,
)
from megarl.rollout.process import child_environment
from megarl.rollout.seeds import sample_seeds
from megarl.rollout.statistics import evaluation_metrics
from megarl.types import (
    GroupOutcome,
    GroupRequest,
    Member,
    Prompt,
    Sampling,
    StepMetrics,
)

__all__ = ["Collector", "CollectorSettings"]
log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
_RECALL_TIMEOUT_S = 60.0  # twice what a server has
_CLOSE_TIMEOUT_S = 5.0
_TAIL_BYTES = 3000
# glibc's: blocks of up to 32 MB come out of one heap, of which 256 MB may lie idle.
_ALLOCATION = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
}


class Collector:
    def __init__(self, settings: CollectorSettings) -> None:
        """Starts the process and returns at once. `reward_names` of the reward's components are
        empty as long as no response has ended.
        """
        self.settings = settings
        self.reward_names: tuple[str, ...] = ()
        self._changed = threading.Condition()
        self._outcomes: deque[GroupOutcome] = deque()
        self._suspects: dict[Member, str] = {}
        self._issued: dict[int, GroupRequest] = {}
        self._evaluations: dict[int, dict[int, GroupRequest]] = {}
        self._evaluated: dict[int, list[GroupOutcome]] = {}
        self._done: dict[int, Json] = {}
        self._calls = 0
        self._serving = self._recalled = False
        self._progress = time.monotonic()  # when something last ended, or began
        self._ready = self._closing = False
        self._error: MegarlError | None = None
        self._process, self._connection = _start(settings)
        self._start_deadline = time.monotonic() + START_TIMEOUT_S
        self._to_send: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._say(settings.to_json())
        for target in (self._read, self._write):
            threading.Thread(target=target, name="collector", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    # ---- protocols.Collector -------------------------------------------------------------------

    def serve_from(self, members: Sequence[Member], version: int = 0) -> None:
        self._begins(serving=bool(members))
        told = [asdict(m) for m in members]
        self._say({"do": "serve_from", "members": told, "version": version})

    def issue(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            sampling = request.sampling
            given = (sampling.top_p, sampling.top_k, sampling.min_p)
            assert given == (1.0, -1, 0.0), f"training never truncates: {given}"
            with self._changed:
                assert request.serial not in self._issued, f"group {request.serial} is under way"
                self._issued[request.serial] = request
        self._begins()
        self._say({"do": "issue", "requests": [request_to_json(r) for r in requests]})

    def wait(self, count: int, timeout_s: float) -> None:
        def told() -> bool:
            enough = len(self._outcomes) >= count
            return enough or self._error is not None or bool(self._suspects)

        self._await(told, time.monotonic() + timeout_s)

    def take(self) -> list[GroupOutcome]:
        """What had ended before an error is taken before the error is raised. Raises RunError also
        where nothing has ended for longer than any group may take.
        """
        with self._changed:
            outcomes = list(self._outcomes)
            self._outcomes.clear()
            if self._error is not None and not outcomes:
                raise self._error
            if not outcomes:
                self._require_progress()
        return outcomes

    def suspects(self) -> dict[Member, str]:
        with self._changed:
            found, self._suspects = self._suspects, {}
        return found

    def recall(self) -> None:
        """Raises RunError when the process does not say in bounded time that all has stopped."""
        self._begins(recalled=True)
        self._call({"do": "recall"}, _RECALL_TIMEOUT_S)

    def resume(self) -> None:
        self._begins(recalled=False)
        self._say({"do": "resume"})

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        area: str,
        samples_per_prompt: int = 1,
        pass_at: Sequence[int] = (),
    ) -> StepMetrics:
        """Of the prompts that were sampled: those that failed are counted and told of. Raises
        ServerError when none could be sampled, also when no server answers for
        `request_timeout_s`.
        """
        seeds = sample_seeds(self.settings.seed, 0, prompts, samples_per_prompt)
        requests = [
            GroupRequest(serial, 0, prompt, tuple(own), sampling)
            for serial, (prompt, own) in enumerate(zip(prompts, seeds, strict=True))
        ]
        outcomes = self._evaluate(requests)
        failed = [o for o in outcomes if o.failed]
        if failed:
            last = f"{prompts[failed[-1].serial].id}: {failed[-1].failed}"
            text = f"{area}: {len(failed)} of {len(prompts)} prompts failed, the last one {last}"
            if len(failed) == len(prompts):
                raise ServerError(text)
            log.warning("%s", text)
        outcomes.sort(key=lambda o: o.serial)
        return evaluation_metrics(outcomes, samples_per_prompt, self.reward_names, area, pass_at)

    def close(self) -> None:
        """Ends the process, and with it what servers are doing for it."""
        self._closing = True
        self._say({"do": "close"})
        self._to_send.put(None)
        if self._ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_TIMEOUT_S)
        if self._process.poll() is None:  # it imports still, or hangs
            self._process.kill()
            try:
                self._process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.error("the collector (pid %d) does not end, killed as it is", self._process.pid)
        self._connection.close()

    # ---- beyond it -----------------------------------------------------------------------------

    def probe_routing(self, tokens: Sequence[int]) -> None:
        """One token from every server, with the experts it was routed to. Raises ServerError."""
        timeout_s = self.settings.request_timeout_s + 10.0
        reply = self._call({"do": "probe_routing", "tokens": list(tokens)}, timeout_s)
        if reply["wrong"]:
            raise ServerError(
                f"moe.routing_replay=rollout: {reply['wrong']} "
                "(SGLang: --enable-return-routed-experts)"
            )

    # ---- inside --------------------------------------------------------------------------------

    def _say(self, message: Json) -> None:
        self._to_send.put(make_frame(message))

    def _begins(self, *, serving: bool | None = None, recalled: bool | None = None) -> None:
        """Something, from which on groups have their time."""
        with self._changed:
            self._serving = self._serving if serving is None else serving
            self._recalled = self._recalled if recalled is None else recalled
            self._progress = time.monotonic()

    def _patience_s(self, groups: Iterable[GroupRequest]) -> float:
        """They end one after the other, each in bounded time."""
        settings, size = self.settings, max((len(g.seeds) for g in groups), default=0)
        asking_s = (settings.max_attempts + 1) * settings.request_timeout_s
        return asking_s + size * settings.reward_timeout_s

    def _require_progress(self) -> None:
        busy = self._ready and self._serving and not self._recalled and bool(self._issued)
        seconds = time.monotonic() - self._progress
        if busy and seconds > self._patience_s(self._issued.values()):
            raise RunError(
                f"the collector process (pid {self.pid}) ended none of {len(self._issued)} groups "
                f"for {seconds:.0f} s; see {self.settings.log_file}"
            )

    def _evaluate(self, requests: Sequence[GroupRequest]) -> list[GroupOutcome]:
        """In the order in which they ended."""
        with self._changed:
            self._calls += 1
            call = self._calls
            self._evaluations[call] = {r.serial: r for r in requests}
            self._evaluated[call] = []
        given = [request_to_json(r) for r in requests]
        self._say({"do": "evaluate", "evaluation": call, "requests": given})
        try:
            self._await_evaluation(call)
            return self._evaluated[call]
        finally:
            with self._changed:
                del self._evaluations[call], self._evaluated[call]

    def _await_evaluation(self, call: int) -> None:
        left = self._evaluations[call]
        patience_s = self._patience_s(left.values())
        while left:
            count = len(left)

            def progress(before: int = count) -> bool:
                return len(left) < before or self._error is not None

            ended = self._await(progress, time.monotonic() + patience_s)
            if self._error is not None:
                raise self._error
            if not ended:
                raise RunError(
                    f"the collector process (pid {self.pid}) ended no group of an evaluation for "
                    f"{patience_s:g} s; see {self.settings.log_file}"
                )

    def _call(self, message: Json, timeout_s: float) -> Json:
        """The process's reply. Raises what it failed of, or RunError."""
        with self._changed:
            self._calls += 1
            call = self._calls
        self._await(lambda: self._ready or self._error is not None, None)
        self._say({**message, "id": call})
        told = self._await(
            lambda: call in self._done or self._error is not None, time.monotonic() + timeout_s
        )
        if call in self._done:
            return self._done.pop(call)
        if self._error is not None:
            raise self._error
        assert not told
        raise RunError(
            f"the collector process (pid {self.pid}) did not {message['do']} within "
            f"{timeout_s:g} s; see {self.settings.log_file}"
        )

    def _await(self, told: Callable[[], bool], deadline: float | None) -> bool:
        """Whether `told()` holds by the deadline. Raises RunError when the process has not started
        by then."""
        with self._changed:
            while not told():
                now = time.monotonic()
                ends = [d for d in (deadline, None if self._ready else self._start_deadline) if d]
                if deadline is not None and now >= deadline:
                    return False
                if not self._ready and now >= self._start_deadline:
                    raise RunError(
                        f"the collector process (pid {self.pid}) was not ready within "
                        f"{START_TIMEOUT_S:g} s; end of {self._tail()}"
                    )
                self._changed.wait(min(ends) - now if ends else None)
        return True

    def _write(self) -> None:
        while (frame := self._to_send.get()) is not None:
            try:
                send_frame(self._connection, frame)
            except OSError:
                return  # the reader says why

    def _read(self) -> None:
        try:
            while (frame := receive_frame(self._connection)) is not None:
                self._hear(*frame)
        except (OSError, EOFError) as error:
            log.debug("the collector's socket: %s", error)
        except Exception as error:
            log.exception("what the collector process said was not understood")
            self._error = self._error or error_from_json(error_to_json(error))
        self._died()

    def _hear(self, message: Json, arrays: list[Array]) -> None:
        with self._changed:
            if "outcome" in message:
                self._progress = time.monotonic()
                self._outcome(message, arrays)
            elif "suspect" in message:
                self._suspects[member_from_json(message["suspect"])] = message["reason"]
            elif "done" in message:
                self._done[message["done"]] = message
            elif "error" in message:
                self._error = self._error or error_from_json(message["error"])
            else:
                self._ready, self._progress = True, time.monotonic()
            self._changed.notify_all()

    def _outcome(self, message: Json, arrays: list[Array]) -> None:
        about, call = message["outcome"], message["evaluation"]
        self.reward_names = tuple(message["names"]) or self.reward_names
        waiting = self._issued if call is None else self._evaluations.get(call, {})
        request = waiting.pop(about["serial"], None)
        if request is None:
            return  # of an evaluation that has failed meanwhile
        outcome = outcome_from_frame(about, arrays, request)
        (self._outcomes if call is None else self._evaluated[call]).append(outcome)

    def _died(self) -> None:
        try:
            code = self._process.wait(_CLOSE_TIMEOUT_S)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "its socket is closed"
        with self._changed:
            if self._error is None and not self._closing:
                self._error = RunError(
                    f"the collector process (pid {self.pid}) ended: {how}; end of {self._tail()}"
                )
            self._changed.notify_all()

    def _tail(self) -> str:
        path = self.settings.log_file
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return f"{path}:\n{file.read().decode(errors='replace').strip()}"


def _start(settings: CollectorSettings) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    settings.log_file.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with theirs, os.fdopen(os.open(settings.log_file, flags, 0o600), "ab") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megarl.rollout.collector_process",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            env=_environment(),
        )
    return process, ours


def _environment() -> dict[str, str]:
    """Replies are some MB each: their memory is kept for the next ones, not given back and zeroed
    anew by the system every time.
    """
    return {**_ALLOCATION, **child_environment()}
