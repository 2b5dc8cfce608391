"""Readable samples of a step: ``samples/step_N.jsonl``, a line a sample. Text in, text out.

Model text is untrusted: it is printed without markup and with control characters spelled out, so
that a response cannot move the cursor or retitle a terminal.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import DataError

if TYPE_CHECKING:  # it imports torch, which reports are written without
    from megarl.types import Sample

_NAME = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True)
class SampleText:
    """One sample as a person reads it. ``version``: weights that sampled its first token."""

    step: int
    prompt: str
    response: str
    answer: str
    reward: float
    correct: bool
    truncated: bool
    version: int
    prompt_id: str = ""
    tokens: int = 0  # of the response

    @staticmethod
    def of(
        sample: "Sample", step: int, decode: Callable[[Sequence[int]], str], answer: str
    ) -> "SampleText":
        tokens = sample.tokens.tolist()
        prompt = int(sample.mask.argmax()) if sample.mask.any() else len(tokens)
        if sample.version_spans:  # of a continued response perhaps only the end is trained
            prompt = len(tokens) - sample.version_spans[-1].end
        return SampleText(
            step=step,
            prompt=decode(tokens[:prompt]),
            response=decode(tokens[prompt:]),
            answer=answer,
            reward=sample.reward,
            correct=sample.correct,
            truncated=sample.truncated,
            version=sample.version_spans[0].version if sample.version_spans else -1,
            prompt_id=sample.prompt_id,
            tokens=len(tokens) - prompt,
        )


def write_samples(folder: Path, step: int, samples: Sequence[SampleText]) -> Path:
    """Write a step's samples, whole or not at all. A step done again replaces its own file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step}.jsonl"
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    lines = (json.dumps(asdict(s), ensure_ascii=False) + "\n" for s in samples)
    # Half a surrogate pair has no UTF-8; spelled out it is still JSON.
    part.write_text("".join(lines), "utf-8", errors="backslashreplace")
    os.replace(part, path)
    return path


def sample_steps(folder: Path) -> list[int]:
    """The steps with kept samples, rising."""
    names = (_NAME.fullmatch(p.name) for p in folder.glob("step_*.jsonl"))
    return sorted(int(m[1]) for m in names if m)


def read_samples(folder: Path, step: int) -> list[SampleText]:
    """Raises DataError naming the file, the line and what is wrong with it."""
    path = folder / f"step_{step}.jsonl"
    known = {f.name for f in fields(SampleText)}
    samples = []
    # Not splitlines(): JSON text may hold other line separators.
    lines = path.read_text("utf-8").rstrip("\n").split("\n")
    for number, line in enumerate(lines if any(lines) else [], start=1):
        try:
            row = json.loads(line)
            samples.append(SampleText(**{k: v for k, v in row.items() if k in known}))
        except (ValueError, TypeError, AttributeError) as e:
            raise DataError(f"{path}:{number} is not a sample: {e}") from e
    return samples


def printable(text: str) -> str:
    """Control and other invisible characters spelled out: ``\\x1b[2J``. Line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def describe(sample: SampleText) -> str:
    """The one-line heading of a sample."""
    verdict = "correct" if sample.correct else "wrong"
    cut = ", cut off" if sample.truncated else ""
    length = f", {sample.tokens} tokens" if sample.tokens else ""
    name = f" {sample.prompt_id}" if sample.prompt_id else ""
    return (
        f"step {sample.step}{name}: reward {sample.reward:g}, {verdict}{cut}{length}, "
        f"weights {sample.version}"
    )
