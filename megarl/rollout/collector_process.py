"""The process of a collector: `python -m megarl.rollout.collector_process SOCKET PARENT`.

Three threads beside the event loop, which alone speaks to servers: one reads what the trainer says,
one scores (text, rewards: they may take long, and run one after the other, in `reward_process.py`),
one writes. It ends when the trainer says so, closes its end of the socket, or is gone.
"""

import asyncio
import gc
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from megarl.data.tokenizer import load_tokenizer
from megarl.errors import MegarlError
from megarl.rollout.client import Answer, Ask, RolloutClient, new_rids
from megarl.rollout.frames import Array, Frame, make_frame, receive_frame, send_frame
from megarl.rollout.messages import (
    CollectorSettings,
    Json,
    error_to_json,
    member_from_json,
    outcome_to_frame,
    request_from_json,
)
from megarl.rollout.pool import Pool
from megarl.rollout.process import follow_parent, read_key
from megarl.rollout.reward_process import RewardProcess, UnscoredError, keeper
from megarl.rollout.routed import connect as connect_to
from megarl.rollout.sampler import Rules, Sampled, sample_group
from megarl.rollout.scoring import Grade, Scorer
from megarl.types import GroupOutcome, GroupRequest, Member, Sample, Sampling

log = logging.getLogger(__name__)

_FILES = 65536
_COLLECT_AFTER = 100_000  # lists and the like that live: a reply alone has thousands

Say = Callable[..., None]  # (message, arrays = ())


class Writer:
    """Sends in a thread of its own, in the order in which it is told to."""

    def __init__(self, to: socket.socket) -> None:
        self._to = to
        self._queue: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def say(self, message: Json, arrays: Sequence[Array] = ()) -> None:
        self._queue.put(make_frame(message, arrays))

    def finish(self) -> None:
        """Returns when all that was said is on its way."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (frame := self._queue.get()) is not None:
            try:
                send_frame(self._to, frame)
            except OSError:
                return  # nobody is there any more


class Work:
    """What the trainer can ask for: one method a message."""

    def __init__(self, settings: CollectorSettings, say: Say, grade: Grade) -> None:
        self._settings, self._say = settings, say
        key = read_key(settings.key_file)
        tokenizer = load_tokenizer(settings.hf, settings.eos_ids)  # last: that takes seconds
        self._scorer = Scorer(tokenizer.decode, grade, mask_continued=settings.mask_continued)
        self._rules = Rules(
            settings.partial,
            settings.max_attempts,
            settings.routing,
            settings.request_timeout_s,
            frozenset(tokenizer.eos_ids),
        )

        def connect(member: Member) -> RolloutClient:
            return connect_to(member, key, settings.request_timeout_s)

        self._pool = Pool(connect, self._suspected, settings.max_in_flight)
        self._scoring = ThreadPoolExecutor(1, "scoring")
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, message: Json) -> None:
        operations: dict[str, Callable[[Json], None]] = {
            "serve_from": self._serve_from,
            "issue": self._issue,
            "recall": lambda m: self._start(self._recall(m)),
            "resume": lambda m: self._pool.resume(),
            "evaluate": self._evaluate,
            "probe_routing": lambda m: self._start(self._probe_routing(m)),
        }
        try:
            operations[message["do"]](message)
        except Exception as error:
            log.exception("the collector failed")
            self._say({"error": error_to_json(error)})

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, MegarlError):
                log.error("the collector failed", exc_info=error)
            self._say({"error": error_to_json(error)})

    def _suspected(self, member: Member, reason: str) -> None:
        self._say({"suspect": asdict(member), "reason": reason})

    def _serve_from(self, message: Json) -> None:
        members = [member_from_json(m) for m in message["members"]]
        self._pool.serve_from(members, message["version"])

    def _issue(self, message: Json) -> None:
        for given in message["requests"]:
            self._start(self._group(request_from_json(given), self._rules))

    def _evaluate(self, message: Json) -> None:
        """No group of it is discarded, and none is routed."""
        rules = replace(self._rules, routing=None)
        if rules.partial == "discard":
            rules = replace(rules, partial="restart")
        for given in message["requests"]:
            request = request_from_json(given)
            self._start(self._group(request, rules, evaluation=message["evaluation"]))

    async def _group(
        self, request: GroupRequest, rules: Rules, *, evaluation: int | None = None
    ) -> None:
        patience = None if evaluation is None else self._settings.request_timeout_s
        sampled = await sample_group(request, self._pool, rules, patience_s=patience)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._scoring, self._finish, request, sampled, evaluation)

    def _finish(self, request: GroupRequest, sampled: Sampled, evaluation: int | None) -> None:
        """In the scoring thread."""
        samples, unscored = tuple[Sample, ...](), ""
        try:
            samples = self._scorer.samples(request, sampled.completions)
        except UnscoredError as error:
            log.error("%s", error)
            unscored = str(error)
        outcome = GroupOutcome(
            serial=request.serial,
            samples=samples,
            failed=sampled.failed or unscored,
            unscored=bool(unscored),
            discarded=sampled.discarded,
            attempts=sampled.attempts,
            tokens=sampled.tokens,
        )
        about, arrays = outcome_to_frame(outcome)
        names = self._scorer.reward_names
        self._say({"outcome": about, "evaluation": evaluation, "names": names}, arrays)

    async def _recall(self, message: Json) -> None:
        await self._pool.recall()
        self._say({"done": message["id"]})

    async def _probe_routing(self, message: Json) -> None:
        """One token from every server, with the experts it was routed to."""
        outcomes = await asyncio.gather(
            *(self._probe(member, message["tokens"]) for member in self._pool.members)
        )
        wrong = next((text for text in outcomes if text), "")
        self._say({"done": message["id"], "wrong": wrong})

    async def _probe(self, member: Member, tokens: Sequence[int]) -> str:
        ask = Ask(new_rids(1)[0], tokens, 1, 0)
        client = self._pool.client(member)
        outcome = await client.generate([ask], Sampling(0.0, 1), self._settings.routing)
        wrong = outcome.wrong if isinstance(outcome, Answer) else outcome.reason
        if isinstance(outcome, Answer) and outcome.parts[0] and outcome.parts[0].routing is None:
            wrong = "the response was aborted"
        return wrong and f"{member.name} ({member.url}): {wrong}"


async def serve(connection: socket.socket, work: Work) -> None:
    """Until the other side closes."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def read() -> None:
        while True:
            try:
                frame = receive_frame(connection)
            except (OSError, EOFError):
                frame = None
            if frame is None or frame[0]["do"] == "close":
                loop.call_soon_threadsafe(ended.set)
                return
            loop.call_soon_threadsafe(work.handle, frame[0])

    threading.Thread(target=read, name="reader", daemon=True).start()
    await ended.wait()
    await work.close()


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    connection = socket.socket(fileno=int(arguments[0]))
    with keeper([connection.fileno()]) as rewards:  # first: there are no threads yet
        follow_parent(int(arguments[1]), lambda: os._exit(1))
        return collect(connection, rewards)


def collect(connection: socket.socket, rewards: socket.socket) -> int:
    """Until the trainer has had enough; the exit code. `rewards`: of `keeper`."""
    # Who stops a whole job tells all its processes; the trainer ends us when it is done with us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a connection a group in flight
    enough = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
    first = receive_frame(connection)
    if first is None:
        return 0
    writer = Writer(connection)
    try:
        settings = CollectorSettings.from_json(first[0])
        reward = RewardProcess(rewards, settings.reward, settings.reward_timeout_s)
        work = Work(settings, writer.say, reward.grade)
        reward.wait_ready()
    except MegarlError as error:
        writer.say({"error": error_to_json(error)})
        writer.finish()
        return 1
    gc.collect()
    gc.freeze()  # a million objects of imports, which every collection would walk through
    gc.set_threshold(_COLLECT_AFTER)
    writer.say({"ready": os.getpid()})
    asyncio.run(serve(connection, work))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
