"""Which sequence computes which tokens in the next step. Host bookkeeping only; no tensors.

1. A sequence waits, then owns a slot, then is finished. First come, first served; a slot never
   changes hands before its sequence is finished or retracted.
2. Of a sequence's tokens the first `done` have their keys and values in its slot. The rest are fed
   in order; the row of the last one gives the distribution of the next token.
3. Sequences with the same tokens that are admitted together compute them once: the first leads, the
   others get no rows until its last token is fed, and then take over its keys, values and records.
4. Retracting returns a sequence to the front of the queue with `done = 0` and all its tokens: it
   is fed again, under whatever weights there are then. What was recorded of a token when it was
   first fed (routing, input log-prob) stays: it belongs to the weights that sampled.
"""

import heapq
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.rollout.wire import Generated, GenerateRequest


class Ticket:
    """One call's requests; its future is set when the last of them is finished."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        self.future: Future[list[Generated]] = Future()
        self.results: list[Generated | None] = [None] * len(requests)
        self._left = len(requests)

    def settle(self, place: int, result: Generated) -> None:
        self.results[place] = result
        self._left -= 1
        if self._left == 0 and not self.future.done():
            self.future.set_result([r for r in self.results if r is not None])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    @property
    def failed(self) -> bool:
        return self.future.done() and self.future.exception() is not None


@dataclass(eq=False, slots=True)
class Sampled:
    """A request on its way. (`Sequence` would be the word, were it not taken.)"""

    request: GenerateRequest
    ticket: Ticket
    place: int  # in the ticket
    seed: int
    tokens: list[int]  # prompt and what was sampled
    done: int = 0
    slot: int | None = None
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    routing: NDArray[np.int32] | None = None  # [capacity, M, K]
    routed: int = 0  # rows of `routing` that are recorded
    leader: "Sampled | None" = None  # computes these tokens for us
    followers: list["Sampled"] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def members(self) -> list["Sampled"]:
        """All for whom this one's rows are computed."""
        return [self, *self.followers]

    def dismiss(self) -> list["Sampled"]:
        """Lets the followers go on by themselves, as far as this one is; returns them."""
        followers, self.followers = self.followers, []
        for follower in followers:
            follower.leader, follower.done = None, self.done
        return followers

    def record_routing(self, position: int, experts: NDArray[np.int32]) -> None:
        """`experts` [M, K] of the token at `position`; the first record stands."""
        if not self.request.return_routing or position < self.routed:
            return
        if self.routing is None:
            capacity = len(self.request.prompt) + self.request.sampling.max_new_tokens
            self.routing = np.zeros((capacity, *experts.shape), np.int32)
        self.routing[position] = experts
        self.routed = position + 1

    def wants_input_logprob(self, position: int) -> bool:
        """Whether the distribution after `position` is that of a prompt token to report, still
        unknown."""
        start = self.request.logprob_start
        wanted = 0 <= start <= position < len(self.request.prompt) - 1
        return wanted and position - start == len(self.input_logprobs)

    def accept(self, token: int, logprob: float, version: str) -> None:
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, self.num_sampled))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def finish_reason(self, eos_ids: frozenset[int]) -> dict[str, object] | None:
        """SGLang's `finish_reason` once the last token ends the sequence; a stop wins over the
        length."""
        sampling = self.request.sampling
        if self.num_sampled and not sampling.ignore_eos:  # as SGLang: that ignores stop tokens, too
            last = self.tokens[-1]
            if last in sampling.stop_token_ids or last in eos_ids:
                return {"type": "stop", "matched": last}
        if self.num_sampled >= sampling.max_new_tokens:
            return {"type": "length", "length": sampling.max_new_tokens}
        return None

    def result(self, finish: dict[str, object]) -> Generated:
        return Generated(
            rid=self.request.rid,
            prompt_tokens=len(self.request.prompt),
            token_ids=self.tokens[len(self.request.prompt) :],
            logprobs=self.logprobs,
            finish=finish,
            versions=self.versions,
            input_logprobs=self.input_logprobs if self.request.logprob_start >= 0 else None,
            routing=None if self.routing is None else self.routing[: len(self.tokens) - 1],
        )


class Schedule:
    """The queue, the slots, and who is in them."""

    def __init__(self, num_slots: int) -> None:
        self.waiting: deque[Sampled] = deque()
        self.running: list[Sampled] = []  # in the order of admission
        self._free = list(range(num_slots))

    def add(self, requests: Sequence[GenerateRequest]) -> Ticket:
        ticket = Ticket(requests)
        for place, request in enumerate(requests):
            seed = request.sampling.seed
            seed = secrets.randbits(63) if seed is None else seed
            self.waiting.append(Sampled(request, ticket, place, seed, list(request.prompt)))
        return ticket

    def admit(self) -> list[int]:
        """Gives free slots (lowest first) to who waits longest; returns the slots newly taken."""
        taken = []
        leaders: dict[tuple[int, ...], Sampled] = {}
        while self.waiting and self._free:
            sequence = self.waiting.popleft()
            sequence.slot = heapq.heappop(self._free)
            taken.append(sequence.slot)
            self.running.append(sequence)
            _follow(leaders.setdefault(tuple(sequence.tokens), sequence), sequence)
        return taken

    def rows(self, budget: int) -> list[tuple[Sampled, int]]:
        """At most `budget` (sequence, position): first one for everyone who only lacks its newest
        token, then prompts, oldest first, as many tokens as fit."""
        leading = [s for s in self.running if s.leader is None]
        rows = [(s, s.done) for s in leading if len(s.tokens) - s.done == 1][:budget]
        for sequence in leading:
            if len(rows) >= budget:
                break
            if len(sequence.tokens) - sequence.done > 1:
                end = min(len(sequence.tokens), sequence.done + budget - len(rows))
                rows += [(sequence, position) for position in range(sequence.done, end)]
        return rows

    def retract_all(self) -> None:
        for sequence in reversed(self.running):
            self._vacate(sequence)
            sequence.leader, sequence.done = None, 0
            sequence.followers.clear()
            self.waiting.appendleft(sequence)
        self.running.clear()

    def finish(self, sequences: Sequence[Sampled]) -> None:
        """Takes running sequences out; the caller settles their tickets."""
        if not sequences:
            return
        gone = set(map(id, sequences))
        for sequence in sequences:
            self._vacate(sequence)
            if sequence.leader is not None:
                sequence.leader.followers.remove(sequence)
            heirs = [s for s in sequence.dismiss() if id(s) not in gone]
            for heir in heirs:  # the leader's keys and values are lost: the next one starts over
                heir.done = 0
                _follow(heirs[0], heir)
        self.running = [s for s in self.running if id(s) not in gone]

    def take(self, rids: Iterable[str] | None) -> list[Sampled]:
        """Removes and returns the sequences with these request ids, or all."""
        wanted = None if rids is None else set(rids)
        taken = [
            s for s in (*self.running, *self.waiting) if wanted is None or s.request.rid in wanted
        ]
        self.finish([s for s in taken if s.slot is not None])
        gone = set(map(id, taken))
        self.waiting = deque(s for s in self.waiting if id(s) not in gone)
        return taken

    def take_of(self, tickets: Sequence[Ticket]) -> list[Sampled]:
        """Removes and returns all sequences of these calls."""
        wanted = set(map(id, tickets))
        return self.take(
            [s.request.rid for s in (*self.running, *self.waiting) if id(s.ticket) in wanted]
        )

    def _vacate(self, sequence: Sampled) -> None:
        assert sequence.slot is not None, sequence.request.rid
        heapq.heappush(self._free, sequence.slot)
        sequence.slot = None


def _follow(leader: Sampled, sequence: Sampled) -> None:
    if sequence is not leader:
        sequence.leader = leader
        leader.followers.append(sequence)
