"""One step of the engine: which rows are computed, and what their logits become.

Prompt tokens give nothing but keys and values (and what was asked to be recorded of them); the row
of a sequence's newest token gives the distribution its next token is drawn from.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.errors import ServerError
from megarl.rollout.embedded_model import SlotModel
from megarl.rollout.embedded_sampling import Truncation, sample, uniforms
from megarl.rollout.embedded_schedule import Sampled, Schedule

CHUNK_FROM = 32  # not in fixed shape: so many tokens to feed or more go through in one piece

Finished = list[tuple[Sampled, dict[str, object]]]  # with SGLang's finish_reason


class Stepper:
    def __init__(self, model: SlotModel, schedule: Schedule) -> None:
        self._model, self._schedule = model, schedule

    def step(self, version: str) -> Finished:
        """Admits who is waiting, computes, samples. `version` labels the sampled tokens.

        Returns who is finished; they still hold their slots. A ticket whose logits are not finite
        has failed already.
        """
        finished: Finished = []
        taken = self._schedule.admit()
        if taken:
            self._model.cache.clear(taken)
        if not self._model.fixed_shape:
            for sequence in list(self._schedule.running):
                if sequence.leader is None and len(sequence.tokens) - sequence.done >= CHUNK_FROM:
                    finished += self._feed_chunk(sequence, version)
        rows = self._schedule.rows(self._model.num_slots)
        if rows:
            finished += self._feed_rows(rows, version)
        return finished

    def _feed_rows(self, rows: list[tuple[Sampled, int]], version: str) -> Finished:
        """One forward for all; in fixed shape padded with idle rows. Rows of slot i sit at i if
        they can, so that keys need not be gathered."""
        size = self._model.num_slots if self._model.fixed_shape else len(rows)
        at = _places(rows, size)
        tokens, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
        slots = np.full(size, self._model.num_slots, np.int64)
        tokens[at] = [sequence.tokens[position] for sequence, position in rows]
        positions[at] = [position for _, position in rows]
        slots[at] = _slots([sequence for sequence, _ in rows])
        logits, experts = self._model.forward_rows(tokens, positions, slots)
        return self._read_out(rows, at, logits, None if experts is None else experts[at], version)

    def _feed_chunk(self, sequence: Sampled, version: str) -> Finished:
        start = sequence.done
        rows = [(sequence, position) for position in range(start, len(sequence.tokens))]
        every = any(m.wants_input_logprob(p) for m in sequence.members for _, p in rows)
        assert sequence.slot is not None
        logits, experts = self._model.forward_chunk(
            np.array(sequence.tokens[start:]), start, sequence.slot, all_logits=every
        )
        if not every:
            logits = logits.expand(len(rows), -1)
        return self._read_out(rows, np.arange(len(rows)), logits, experts, version)

    def _read_out(
        self,
        rows: list[tuple[Sampled, int]],
        at: NDArray[np.int64],
        logits: torch.Tensor,
        experts: NDArray[np.int32] | None,
        version: str,
    ) -> Finished:
        """Turns computed rows into records and new tokens. `at[j]` is the row of `logits` of
        `rows[j]`."""
        _read_input_logprobs(rows, at, logits)
        last: list[tuple[Sampled, int]] = []
        copies: list[tuple[Sampled, Sampled]] = []
        for j, (sequence, position) in enumerate(rows):
            sequence.done = position + 1
            if experts is not None:
                for member in sequence.members:
                    member.record_routing(position, experts[j])
            if sequence.done == len(sequence.tokens):
                last += [(member, int(at[j])) for member in sequence.members]
                copies += [(sequence, follower) for follower in sequence.dismiss()]
        if copies:
            sources, targets = zip(*copies, strict=True)
            self._model.cache.copy(_slots(sources), _slots(targets))
        if not last:
            return []
        sequences = [sequence for sequence, _ in last]
        return self._sample(sequences, np.array([row for _, row in last]), logits, version)

    def _sample(
        self, sequences: list[Sampled], at: NDArray[np.int64], logits: torch.Tensor, version: str
    ) -> Finished:
        """One token for each; `at[i]` is the row of `logits` that `sequences[i]` draws from.

        In fixed shape a sequence draws in the row of its slot; other rows draw to no purpose."""
        if self._model.fixed_shape:
            size, rows = self._model.num_slots, at
            at = _slots(sequences)
            index = np.zeros(size, np.int64)
            index[at] = rows
        else:
            size, index, at = len(sequences), at, np.arange(len(sequences))
        logits = logits[torch.from_numpy(index).to(logits.device)]
        temperatures, draws = np.ones(size, np.float32), np.full(size, 0.5)
        temperatures[at] = [s.request.sampling.temperature for s in sequences]
        draws[at] = uniforms(
            np.array([s.seed % 2**64 for s in sequences], np.uint64),
            np.array([len(s.tokens) for s in sequences], np.uint64),
        )
        chosen, logprobs = sample(
            logits,
            torch.from_numpy(temperatures).to(logits.device),
            torch.from_numpy(draws).to(logits.device),
            self._truncation(sequences, at, size),
        )
        tokens, values = chosen.cpu().numpy()[at].tolist(), logprobs.cpu().numpy()[at]
        finite = np.isfinite(values).tolist()
        finished: Finished = []
        for sequence, token, value, good in zip(
            sequences, tokens, values.tolist(), finite, strict=True
        ):
            if not good:
                sequence.ticket.fail(ServerError("the model's logits are not finite"))
                finished.append((sequence, {"type": "abort", "message": "logits are not finite"}))
                continue
            if sequence.num_sampled < sequence.request.sampling.max_new_tokens:
                sequence.accept(token, value, version)
            reason = sequence.finish_reason(self._model.eos_ids)
            if reason is not None:
                finished.append((sequence, reason))
        return finished

    def _truncation(
        self, sequences: list[Sampled], at: NDArray[np.int64], size: int
    ) -> Truncation | None:
        """None where no sequence is truncated, which costs a sort less; the bits of one that is not
        are the same either way.
        """
        params = [sequence.request.sampling for sequence in sequences]
        if not any(p.truncates for p in params):
            return None
        vocab, device = self._model.vocab_size, self._model.device
        top_ks, top_ps, min_ps = np.full(size, vocab), np.ones(size), np.zeros(size)
        top_ks[at] = [p.top_k if p.top_k > 0 else vocab for p in params]
        top_ps[at] = [p.top_p for p in params]
        min_ps[at] = [p.min_p for p in params]
        return Truncation(*(torch.from_numpy(v).to(device) for v in (top_ks, top_ps, min_ps)))


def _read_input_logprobs(
    rows: list[tuple[Sampled, int]], at: NDArray[np.int64], logits: torch.Tensor
) -> None:
    if not any(m.wants_input_logprob(position) for s, position in rows for m in s.members):
        return
    logprobs = torch.log_softmax(logits, dim=-1)
    for j, (sequence, position) in enumerate(rows):
        for member in sequence.members:
            if member.wants_input_logprob(position):  # asks again: each makes the next one due
                following = member.tokens[position + 1]
                member.input_logprobs.append(float(logprobs[int(at[j]), following]))


def _places(rows: list[tuple[Sampled, int]], size: int) -> NDArray[np.int64]:
    """Where in a batch of `size` each row goes: at its slot if all fit there, else one after
    another."""
    slots = _slots([sequence for sequence, _ in rows])
    fits = len(np.unique(slots)) == len(slots) and int(slots.max()) < size
    return slots if fits else np.arange(len(rows))


def _slots(sequences: Sequence[Sampled]) -> NDArray[np.int64]:
    return np.array([sequence.slot for sequence in sequences], np.int64)
