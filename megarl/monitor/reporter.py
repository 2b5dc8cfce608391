"""Rank 0's voice: metrics to files, progress to the terminal, samples and the report to the run
directory.

On other ranks every method does nothing, so callers need not ask which rank they are.
"""

from collections.abc import Mapping, Sequence

from megarl.monitor.progress import Progress
from megarl.monitor.report import write_report
from megarl.monitor.samples import SampleText, write_samples
from megarl.monitor.sinks import open_sinks
from megarl.protocols import MetricSink
from megarl.rundir import RunDir


class Reporter:
    def __init__(
        self,
        rundir: RunDir,
        *,
        total_steps: int,
        rank: int,
        tensorboard: bool,
        resume_step: int | None,
    ) -> None:
        self._rundir = rundir
        self._sinks: list[MetricSink] = []
        self._progress: Progress | None = None
        if rank == 0:
            self._sinks = open_sinks(rundir, tensorboard=tensorboard, resume_step=resume_step)
            self._progress = Progress(total_steps, steps_done=resume_step or 0)

    def step(self, step: int, values: Mapping[str, float], samples: Sequence[SampleText]) -> None:
        """One finished step: its reduced metrics and the samples kept of it."""
        if self._progress is None or not values:
            return
        for sink in self._sinks:
            sink.write(step, values)
        if samples:
            write_samples(self._rundir.samples, step, samples)
        self._progress.update(step, values)

    def note(self, text: str) -> None:
        """A line above the progress."""
        if self._progress is not None:
            self._progress.note(text)

    def finish(self, step: int) -> None:
        """The report, from what lies in the run directory."""
        if self._progress is not None:
            write_report(self._rundir)
            self._progress.note(f"report {self._rundir.report}")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        for sink in self._sinks:
            sink.close()
        self._sinks = []
