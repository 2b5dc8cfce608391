"""What a person sees while a run goes on: a live table in a terminal, plain lines in a log file."""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any

# Column, metric, format. A column whose metric has not come is left out.
COLUMNS = (
    ("reward", "rollout/reward", "{:.3f}"),
    ("accuracy", "rollout/accuracy", "{:.3f}"),
    ("held-out", "eval/accuracy", "{:.3f}"),
    ("loss", "policy/loss", "{:.4g}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad norm", "optim/grad_norm", "{:.3g}"),
    ("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
)
_LINE_S = 2.0  # between plain lines
_ROWS = 12  # of the live table: what fits a small terminal


class Progress:
    """``update`` once a step. ``steps_done``: what was done before this process (a resumed run)."""

    def __init__(
        self,
        total_steps: int,
        *,
        steps_done: int = 0,
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._stream = stream or sys.stdout
        self._clock = clock
        self._start = clock()
        self._before = steps_done
        self._printed = float("-inf")
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=_ROWS)
        self._live: Any = _open_live(self._stream) if self._stream.isatty() else None

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """``step`` is done; steps count from 1 to the total."""
        eta = self._eta(step)
        if self._live is None:
            if not self._due(step, values):
                return
            print(plain_line(step, self._total, values, eta), file=self._stream, flush=True)
            return
        self._rows.append((step, dict(values)))
        self._live.update(self._table(eta), refresh=True)

    def _due(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether a step gets a plain line: the first, the last, evaluations, else every 2 s."""
        now = self._clock()
        first, last = step <= self._before + 1, step == self._total
        if not (first or last or "eval/accuracy" in values or now - self._printed >= _LINE_S):
            return False
        self._printed = now
        return True

    def note(self, text: str) -> None:
        """A line that stays: where the run is, what it waits for."""
        if self._live is None:
            print(text, file=self._stream, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was; safe to call twice."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _eta(self, step: int) -> float | None:
        """Seconds left at the average pace of this process."""
        done = step - self._before
        if done <= 0:
            return None
        return (self._clock() - self._start) / done * max(0, self._total - step)

    def _table(self, eta: float | None) -> Any:
        from rich.table import Table

        shown = [c for c in COLUMNS if any(_cell(c, values) for _, values in self._rows)]
        step, latest = self._rows[-1]
        left = f", {duration(eta)} left" if eta is not None and step < self._total else ""
        table = Table(title=f"step {step} of {self._total}{left}", caption=phases(latest) or None)
        table.add_column("step", justify="right")
        for name, _, _ in shown:
            table.add_column(name, justify="right")
        for number, values in self._rows:
            table.add_row(str(number), *(_cell(c, values) for c in shown))
        return table


def plain_line(step: int, total: int, values: Mapping[str, float], eta: float | None) -> str:
    """``step 3/60  reward 0.512  accuracy 0.480 | rollout 1.2s train 0.8s | 0:01:52 left``"""
    cells = [f"{c[0]} {text}" for c in COLUMNS if (text := _cell(c, values))]
    parts = ["  ".join([f"step {step}/{total}", *cells])]
    if times := phases(values):
        parts.append(times)
    if eta is not None and step < total:
        parts.append(f"{duration(eta)} left")
    return " | ".join(parts)


def phases(values: Mapping[str, float]) -> str:
    """``rollout 1.2s train 0.8s``: the step's phases, longest first."""
    times = {k.removeprefix("time/"): v for k, v in values.items() if k.startswith("time/")}
    longest = sorted(times.items(), key=lambda item: -item[1])
    return " ".join(f"{name} {seconds:.1f}s" for name, seconds in longest)


def duration(seconds: float) -> str:
    """``0:01:52``, ``3 d 04:05:06``"""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{minute:02d}:{second:02d}"
    return f"{days} d {hour:02d}:{clock}" if days else f"{hour}:{clock}"


def _cell(column: tuple[str, str, str], values: Mapping[str, float]) -> str:
    _, metric, form = column
    return form.format(values[metric]) if metric in values else ""


def _open_live(stream: IO[str]) -> Any:
    """Refreshed by ``update`` alone: no thread of rich's beside the trainer's own."""
    from rich.console import Console
    from rich.live import Live

    live = Live(console=Console(file=stream), auto_refresh=False)
    live.start()
    return live
