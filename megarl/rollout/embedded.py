"""The engine behind `megarl serve`: continuous batching in a thread of its own.

All state (queue, slots, weights, version, the update in progress) belongs to the engine thread.
Other threads hand it functions and get futures; it runs them between two steps, so a control
operation never sees half a step, and while an update receives weights no token is sampled.

1. Tokens are sampled only when the engine is neither paused, nor updating, nor unusable.
2. Weights: `begin_update`, any number of `receive`, `end_update`. An error in between makes the
   engine unusable: every request, present and future, fails with the reason, until an update that
   received every weight, or a load from disk, succeeds.
3. The version is a label on sampled tokens. It moves in `set_version`, in a load from disk that
   names one, and in an `end_update` that names one; never by receiving alone.
4. Memory that was given back (`release`) has to be taken again (`restore`) before anything needs
   it: until then, and until weights have come whole, every request fails.
5. In fixed-shape mode a request's tokens and log-probs, with a seed, depend on nothing but the
   request and the weights (see embedded_model.py and embedded_sampling.py for how).
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch

from megarl.errors import MegarlError, ServerError
from megarl.models.published import reading
from megarl.rollout.embedded_memory import KV_CACHE, MEMORY, WEIGHTS, Memory, Released
from megarl.rollout.embedded_model import SlotModel
from megarl.rollout.embedded_receiver import WeightReceiver
from megarl.rollout.embedded_schedule import Sampled, Schedule, Ticket
from megarl.rollout.embedded_step import Stepper
from megarl.rollout.wire import BadRequest, Generated, GenerateRequest, Limits

log = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_MODES = ("abort", "retract", "in_place")
_CLOSED = "no weight update is open; call /begin_weight_update first"


class Refused(MegarlError):
    """A control operation that the engine's present state does not allow."""


class Unusable(ServerError):
    """The weights are half old, half new, or broken: nothing can be generated."""


class Engine:
    def __init__(self, model: SlotModel, receiver: WeightReceiver, *, num_threads: int = 1) -> None:
        self.model, self.receiver = model, receiver
        self.limits = Limits(model.vocab_size, model.context_length, model.has_routing)
        self.version = "0"
        self.unusable: str | None = None
        self.paused: str | None = None  # the mode
        self.updating = False
        self.memory = Memory()
        self.steps = 0
        self._schedule = Schedule(model.num_slots)
        self._stepper = Stepper(model, self._schedule)
        self._active: set[str] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- from any thread -----------------------------------------------------------------------

    def start(self) -> None:
        if self.model.fixed_shape:
            self.model.check_rows_agree()
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Ends the thread after its present step; a receive that blocks it is left to the
        process's end."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, requests: Sequence[GenerateRequest]) -> Future[list[Generated]]:
        """The results in the order of the requests. Fails with BadRequest for an id that is in use,
        with Unusable while there are no whole weights."""
        outer: Future[list[Generated]] = Future()

        def put() -> None:
            if not outer.set_running_or_notify_cancel():
                return
            try:
                ticket = self._enqueue(requests)
            except Exception as error:
                outer.set_exception(error)
            else:
                ticket.future.add_done_callback(lambda inner: _pass_on(inner, outer))

        self._inbox.put(put)
        return outer

    def abort(self, rids: Iterable[str] | None) -> Future[int]:
        """Ends these requests (None: all) with what they have; unknown ids are no error."""
        rids = None if rids is None else list(rids)
        return self._call(lambda: self._abort(rids, "aborted on request"))

    def pause(self, mode: str) -> Future[None]:
        """No token is sampled until `resume`. abort: end every request; retract: keep them, feed
        them anew afterwards; in_place: keep them with their keys and values."""
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self._call(self._resume)

    def flush(self) -> Future[None]:
        return self._call(self._flush)

    def begin_update(self) -> Future[None]:
        return self._call(self._begin_update)

    def update(self, step: Callable[[WeightReceiver], Future[None]]) -> Future[None]:
        """A bucket of the update that is open: done when what ``step`` returns is. Another may be
        begun before.
        """
        outer: Future[None] = Future()
        self._inbox.put(lambda: self._update(step, outer))
        return outer

    def end_update(self, version: str | None = None) -> Future[None]:
        return self._call(lambda: self._end_update(version))

    def load_folder(self, folder: Path, version: str | None, *, abort: bool) -> Future[int]:
        """Weights from disk, between two steps; running requests are fed anew. Returns how many
        ran."""
        return self._call(lambda: self._load_folder(folder, version, abort))

    def set_version(self, version: str, *, abort: bool) -> Future[None]:
        return self._call(lambda: self._set_version(version, abort))

    def release(self, tags: frozenset[str]) -> Future[None]:
        """Gives back the memory of ``embedded_memory.MEMORY`` that is named. Refused while requests
        run.
        """
        return self._call(lambda: self._release(tags))

    def restore(self, tags: frozenset[str]) -> Future[None]:
        """Takes it again. Weights have to come anew then."""
        return self._call(lambda: self.memory.restore(tags))

    def digests(self) -> Future[tuple[dict[str, str], float]]:
        """By name; and the seconds that all digests since the start have taken."""
        return self._call(lambda: (self._digests(), self.receiver.digest_seconds))

    def held(self) -> Future[dict[str, str]]:
        """Digests of the weights that changes can be made to."""
        return self._call(self.receiver.held)

    def ping(self) -> Future[None]:
        """Done when the thread gets to it."""
        return self._call(lambda: None)

    def state(self) -> dict[str, Any]:
        return {
            "weight_version": self.version,
            "paused": self.paused,
            "updating": self.updating,
            "unusable": self.unusable,
            "released": sorted(self.memory.released),
            "running": len(self._schedule.running),
            "waiting": len(self._schedule.waiting),
            "steps": self.steps,
        }

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    # ---- in the engine thread: the loop --------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while self._serve_inbox():
            if not self._may_step():
                continue
            try:
                self._step()
            except (
                Exception
            ) as error:  # out of memory, a broken kernel: these requests, not the server
                log.exception("a step failed")
                self._fail_all(ServerError(f"generation failed: {error}"))
        self._fail_all(ServerError("the server is shutting down"))

    def _serve_inbox(self) -> bool:
        """Runs what has been handed in; waits for something if there is no step to do. False:
        stop."""
        while True:
            try:
                function = self._inbox.get(block=not self._may_step())
            except queue.Empty:
                return True
            if function is None:
                return False
            function()

    def _may_step(self) -> bool:
        held = self.paused is not None or self.updating or self.unusable is not None
        held |= bool(self.memory.released)
        return not held and bool(self._schedule.running or self._schedule.waiting)

    def _step(self) -> None:
        self.steps += 1
        finished = self._stepper.step(self.version)
        self._schedule.finish([sequence for sequence, _ in finished])
        for sequence, reason in finished:
            self._settle(sequence, reason)
        if failed := [s.ticket for s, _ in finished if s.ticket.failed]:
            for sequence in self._schedule.take_of(failed):  # nobody waits for the others
                self._active.discard(sequence.request.rid)

    # ---- in the engine thread: control ---------------------------------------------------------

    def _enqueue(self, requests: Sequence[GenerateRequest]) -> Ticket:
        if self.unusable is not None:
            raise Unusable(self.unusable)
        try:
            self.memory.require(*MEMORY)
        except Released as error:
            raise Unusable(str(error)) from error
        used = [r.rid for r in requests if r.rid in self._active]
        if used:
            raise BadRequest("rid", used[0], "an id that no running request has")
        self._active.update(r.rid for r in requests)
        return self._schedule.add(requests)

    def _settle(self, sequence: Sampled, finish: dict[str, object]) -> None:
        self._active.discard(sequence.request.rid)
        sequence.ticket.settle(sequence.place, sequence.result(finish))

    def _abort(self, rids: list[str] | None, message: str) -> int:
        taken = self._schedule.take(rids)
        for sequence in taken:
            self._settle(sequence, {"type": "abort", "message": message})
        return len(taken)

    def _fail_all(self, error: Exception) -> None:
        for sequence in self._schedule.take(None):
            self._active.discard(sequence.request.rid)
            sequence.ticket.fail(error)

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            self._abort(None, "aborted by a pause")
        elif mode == "retract":
            self._schedule.retract_all()
        self.paused = mode

    def _resume(self) -> None:
        if self.updating:
            raise Refused("a weight update is open; end it first")
        self.memory.require(*MEMORY)
        self.paused = None

    def _flush(self) -> None:
        if self._schedule.running or (self._schedule.waiting and self.paused is None):
            count = len(self._schedule.running) + len(self._schedule.waiting)
            raise Refused(f"the cache is in use by {count} requests; pause with mode retract first")
        self.model.cache.clear()

    def _begin_update(self) -> None:
        self.memory.require(WEIGHTS)
        self.receiver.begin()
        self.updating = True

    def _update(self, step: Callable[[WeightReceiver], Future[None]], outer: Future[None]) -> None:
        def arrived(bucket: Future[None]) -> None:  # in any thread
            if (error := bucket.exception()) is None:
                outer.set_result(None)
            else:
                self._inbox.put(lambda: failed(error))

        def failed(error: BaseException) -> None:
            self._break(f"a weight update failed: {error}")
            outer.set_exception(error)

        if not outer.set_running_or_notify_cancel():
            return
        if not self.updating:
            outer.set_exception(Refused(_CLOSED))
            return
        try:
            step(self.receiver).add_done_callback(arrived)
        except Exception as error:
            failed(error)

    def _end_update(self, version: str | None) -> None:
        if not self.updating:
            raise Refused(_CLOSED)
        self.updating = False
        try:
            self.receiver.end()
        except Exception as error:
            self._break(f"a weight update is incomplete: {error}")
            raise
        self._take_weights()
        self.unusable = None
        self.version = version or self.version
        self._forget_keys()

    def _forget_keys(self) -> None:
        if self.paused != "in_place":  # who asked for that keeps keys of the old weights knowingly
            self._schedule.retract_all()
            self.model.cache.clear()

    def _take_weights(self) -> None:
        try:
            self.model.weights_changed()
        except Exception as error:
            self._break(f"the weights cannot be used: {error}")
            raise

    def _load_folder(self, folder: Path, version: str | None, abort: bool) -> int:
        count = len(self._schedule.running)
        if self.updating and self.unusable is None:
            raise Refused("a weight update is open; end it first")
        self.memory.require(WEIGHTS)
        with reading(folder):
            source = self.model.open_folder(folder)  # if it is bad, nothing has happened
            if abort:
                self._abort(None, "aborted by a load of weights")
            self.receiver.begin()  # nothing of an update is being written from here on
            try:
                self.model.load_folder(source)
            except Exception as error:
                self._break(f"a load of weights failed: {error}")
                raise
        self._take_weights()
        self._forget_keys()
        self.updating, self.unusable = False, None
        self.version = version or self.version
        return count

    def _set_version(self, version: str, abort: bool) -> None:
        if self.updating:
            raise Refused("a weight update is open; end it first")
        if abort:
            self._abort(None, "aborted by a change of version")
        self.version = version

    def _digests(self) -> dict[str, str]:
        self.memory.require(WEIGHTS)
        try:
            return self.receiver.digests()
        except Exception as error:  # of a bucket that had been received
            self._break(f"a weight update failed: {error}")
            raise

    def _release(self, tags: frozenset[str]) -> None:
        if self.updating:
            raise Refused("a weight update is open; end it first")
        if self._schedule.running or (self._schedule.waiting and self.paused is None):
            raise Refused("requests need the memory; pause with mode retract first")
        new = tags - self.memory.released
        if KV_CACHE in new:
            self.model.cache.drop()
            self.memory.release(KV_CACHE)
        if WEIGHTS in new:
            self._break("its weights have been released, and have not come again")
            self.memory.release(WEIGHTS, self.model.tensors())
            self.model.weights.forget()

    def _break(self, reason: str) -> None:
        log.error("%s", reason)
        self.unusable = reason
        self._fail_all(Unusable(reason))


def _pass_on(inner: Future[T], outer: Future[T]) -> None:
    error = inner.exception()
    if error is not None:
        outer.set_exception(error)
    else:
        outer.set_result(inner.result())
