"""Prompts and demonstrations from JSONL, and the order they are used in.

A line of a prompt file is ``{"id": ..., "prompt": "3 + 5 =", "answer": "8", ...}``: ``prompt`` is
the exact text the model sees, every key but ``prompt`` is the payload its reward gets. A line of a
demonstration file is ``{"prompt": ..., "response": ...}``; the end token is appended.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megarl.data.tokenizer import Tokenizer
from megarl.errors import DataError
from megarl.types import Prompt, Sample

Item = TypeVar("Item")


def load_prompts(path: Path, tokenizer: Tokenizer, max_tokens: int) -> list[Prompt]:
    """Every line of ``path``, in order. ``max_tokens``: of the longest prompt the servers take.

    ``id`` may be left out: then the line number serves. Raises DataError naming the lines.
    """
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for line, row in _rows(path, required=("prompt",)):
        key = str(row.get("id", line))
        if key in line_of:
            raise DataError(f"{path}:{line}: id {key!r} is also on line {line_of[key]}")
        line_of[key] = line
        ids = _encode(tokenizer, row["prompt"], f"{path}:{line}: prompt")
        payload = {k: v for k, v in row.items() if k != "prompt"}
        prompts.append(Prompt(key, tuple(ids), payload))
    _refuse_long(path, [(p.id, len(p.token_ids)) for p in prompts], max_tokens, "prompt")
    return prompts


def load_demonstrations(path: Path, tokenizer: Tokenizer, max_tokens: int) -> list[Sample]:
    """Every line as a Sample that trains on its response and the end token after it.

    ``max_tokens``: of prompt and response together. Raises DataError naming the lines.
    """
    samples: list[Sample] = []
    for line, row in _rows(path, required=("prompt", "response")):
        prompt = _encode(tokenizer, row["prompt"], f"{path}:{line}: prompt")
        response = _encode(tokenizer, row["response"], f"{path}:{line}: response")
        key = str(row.get("id", line))
        samples.append(demonstration(key, len(samples), prompt, [*response, tokenizer.eos_id]))
    _refuse_long(path, [(s.prompt_id, len(s.tokens)) for s in samples], max_tokens, "demonstration")
    return samples


def demonstration(key: str, group: int, prompt: Sequence[int], response: Sequence[int]) -> Sample:
    tokens = np.asarray([*prompt, *response], np.int32)
    return Sample(
        prompt_id=key,
        group=group,
        index=0,
        tokens=tokens,
        mask=np.arange(len(tokens)) >= len(prompt),
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        rewards=np.zeros(1, np.float32),
        correct=True,
        truncated=False,
    )


class EpochStream(Generic[Item]):
    """Items for ever, every one once an epoch, each epoch in an order of its own.

    The order depends on (seed, epoch) alone, so a position is two numbers and survives a restart.

    Example: of 3 items, ``take(8)`` gives 2 whole epochs and 2 items of the third; then ``epoch``
    is 2 and ``offset`` is 2.
    """

    def __init__(self, items: Sequence[Item], seed: int, key: Callable[[Item], str]) -> None:
        assert items, "an empty stream never yields"
        self.items = items
        self.seed = seed
        self.epoch = 0
        self.offset = 0
        names = "\n".join(map(key, items))
        self._digest = hashlib.sha256(names.encode()).hexdigest()
        self._order = self._shuffled()

    def take(self, count: int) -> list[Item]:
        taken: list[Item] = []
        while len(taken) < count:
            part = self._order[self.offset : self.offset + count - len(taken)]
            taken += [self.items[i] for i in part]
            self.offset += len(part)
            if self.offset == len(self.items):
                self.epoch, self.offset = self.epoch + 1, 0
                self._order = self._shuffled()
        return taken

    def state(self) -> dict[str, Any]:
        """The position, as JSON: what ``take`` will give next."""
        position = {"seed": self.seed, "epoch": self.epoch, "offset": self.offset}
        return {**position, "items": len(self.items), "digest": self._digest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataError when it is of other items or another seed."""
        mine = self.state()
        other = [k for k in ("seed", "items", "digest") if state.get(k) != mine[k]]
        if other:
            pairs = ", ".join(f"{k}: saved {state.get(k)}, now {mine[k]}" for k in other)
            raise DataError(f"the data is not what the checkpoint was trained on ({pairs})")
        epoch, offset = int(state["epoch"]), int(state["offset"])
        if epoch < 0 or not 0 <= offset < len(self.items):
            raise DataError(f"a saved data position is damaged: epoch {epoch}, offset {offset}")
        self.epoch, self.offset = epoch, offset
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        """By hash and not by a library's generator: no upgrade may reorder a run half done."""

        def rank(index: int) -> bytes:
            return hashlib.blake2b(f"{self.seed}/{self.epoch}/{index}".encode()).digest()

        return sorted(range(len(self.items)), key=rank)


class PromptStream(EpochStream[Prompt]):
    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        super().__init__(prompts, seed, key=lambda prompt: prompt.id)


class DemonstrationStream(EpochStream[Sample]):
    def __init__(self, samples: Sequence[Sample], seed: int) -> None:
        super().__init__(samples, seed, key=lambda sample: sample.prompt_id)


def _rows(path: Path, required: Sequence[str]) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of every line that is not blank; ``required`` keys hold some text."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path} cannot be read: {e}") from e
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as e:
            raise DataError(f"{path}:{number}: not JSON ({e})") from e
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: found {type(row).__name__}; accepted: a JSON object")
        for key in required:
            if not isinstance(row.get(key), str) or not row[key]:
                raise DataError(
                    f"{path}:{number}: {key!r} is {row.get(key)!r}; accepted: some text"
                )
        rows.append((number, row))
    if not rows:
        raise DataError(f"{path} is empty")
    return rows


def _encode(tokenizer: Tokenizer, text: str, where: str) -> list[int]:
    try:
        ids = tokenizer.encode(text)
    except DataError as e:
        raise DataError(f"{where}: {e}") from e
    if not ids:
        raise DataError(f"{where}: {text!r} has no tokens")
    return ids


def _refuse_long(path: Path, lengths: Sequence[tuple[str, int]], limit: int, what: str) -> None:
    long = [f"{key} ({n} tokens)" for key, n in lengths if n > limit]
    if long:
        shown = ", ".join(long[:5]) + (", ..." if len(long) > 5 else "")
        raise DataError(f"{path}: {len(long)} {what}s are longer than {limit} tokens: {shown}")
