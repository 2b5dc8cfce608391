"""Where step metrics go: ``metrics.jsonl`` always, TensorBoard if wanted.

metrics.jsonl has one line a step, steps strictly rising: ``{"step": 3, "time": 1764.2,
"policy/loss": 0.1}``. Values that JSON cannot hold are null there and named once more in
``"nonfinite": {"policy/loss": "nan"}``.

1. A fresh run never writes into a file that holds lines; a resumed run appends.
2. Lines past the resumed step belong to work that is done again: they are moved, never overwritten,
   to ``metrics.superseded.jsonl``, and the log says so. A line torn by a crash goes there as well.
3. A disk that is full ends the run with the file's name, not with a half-written line unnoticed.
"""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import RunError
from megarl.rundir import RunDir

if TYPE_CHECKING:  # brings torch, which reading metrics does not need
    from megarl.protocols import MetricSink

log = logging.getLogger(__name__)


def open_sinks(run: RunDir, *, tensorboard: bool, resume_step: int | None) -> "list[MetricSink]":
    """The sinks of rank 0. ``resume_step``: the last step that is kept; None for a fresh run."""
    sinks: list[MetricSink] = [JsonlSink(run.metrics, resume_step=resume_step)]
    if tensorboard:
        sinks.append(TensorBoardSink(run.tensorboard, resume_step=resume_step))
    return sinks


class JsonlSink:
    def __init__(self, path: Path, *, resume_step: int | None) -> None:
        """Raises RunError if a fresh run would write into a file with lines in it."""
        self._path = path
        self._last_step = -1
        with _disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None:
                self._last_step = _set_aside(path, resume_step)
            elif path.exists() and path.stat().st_size:
                raise RunError(
                    f"{path} holds the metrics of a run: set run.resume to go on with it, "
                    "or run.dir to another folder"
                )
            self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        assert step > self._last_step, (step, self._last_step)
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {k: float(v) if math.isfinite(v) else None for k, v in values.items()}
        if strange := {k: str(float(v)) for k, v in values.items() if not math.isfinite(v)}:
            line["nonfinite"] = strange
        with _disk(self._path):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        self._last_step = step

    def close(self) -> None:
        with _disk(self._path):
            self._file.close()


class TensorBoardSink:
    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with _disk(folder):
            # Hides, in TensorBoard, what an earlier attempt wrote past the resumed step.
            purge = None if resume_step is None else resume_step + 1
            self._writer: Any = SummaryWriter(str(folder), purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with _disk(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        with _disk(self._folder):
            self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, nonfinite values put back; empty where there is none.

    A torn last line, as a crash leaves it, is skipped with a warning.
    """
    if not path.exists():
        return []
    rows = []
    for number, text in enumerate(path.read_text("utf-8", errors="replace").splitlines(), start=1):
        row = _parse(text)
        if row is None:
            log.warning("%s:%d is not a line of metrics; skipped", path, number)
            continue
        row |= {k: float(v) for k, v in row.pop("nonfinite", {}).items()}
        rows.append(row)
    return rows


def _set_aside(path: Path, resume_step: int) -> int:
    """Move all lines but those of steps 0..``resume_step`` away; the last step left, or -1."""
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    steps = [-1 if (row := _parse(text)) is None else int(row["step"]) for text in lines]
    kept = [n for n, step in enumerate(steps) if 0 <= step <= resume_step]
    moved = [text for n, text in enumerate(lines) if n not in set(kept)]
    if moved:
        aside = path.with_name(f"{path.stem}.superseded{path.suffix}")
        with aside.open("a", encoding="utf-8") as f:
            f.writelines(f"{text}\n" for text in moved)
            f.flush()
            os.fsync(f.fileno())
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(f"{lines[n]}\n" for n in kept), "utf-8")
        os.replace(part, path)
        log.warning(
            "%s: %d lines past step %d moved to %s", path, len(moved), resume_step, aside.name
        )
    return steps[kept[-1]] if kept else -1


def _parse(text: str) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Says which file could not be written, and how much room there is."""
    try:
        yield
    except OSError as e:
        try:
            free = f"{shutil.disk_usage(path.parent).free / 1e6:.0f} MB free"
        except OSError:
            free = "its folder is gone"
        raise RunError(f"cannot write {path}: {e.strerror or e} ({free})") from e
