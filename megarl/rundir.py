"""The run directory: the names of everything in it, and the rule that one run owns one directory.

::

    config.yaml               the settings as given, loadable again
    config.resolved.json      every setting
    run.lock                  held (flock) by rank 0 while the run lives
    logs/                     rank_N.log, collector_N.log, server_K.log, torchrun_LAUNCH_NODE.log
    errors/LAUNCH/            rank_N.json: first error of a rank in one start of the run
    metrics.jsonl             a line a step; tensorboard/ the same, report.html drawn from it
    ops.json                  which ops ran compiled, and how often each was called
    fp8.json                  which matrix products are in FP8 (with precision.fp8)
    samples/step_N.jsonl      samples for people
    books.jsonl               every group of samples, from its issue to its end
    rollouts/step_N.npz       all samples, for train_only runs
    nonfinite/                step_N_rank_R.npz: rows that gave a NaN or an infinity
    weights/version_N/        the last two that servers load (sync.transport=disk)
    checkpoints/step_N/
    attempts/N/               what a start has left that failed before its first checkpoint
    server_K.json             where a server that runs is: url, pid, host, boot, ranks, version
    server.key                its key, mode 0600
"""

import fcntl
import json
import os
import socket
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megarl.errors import LASTING, RunError

_OF_A_RUN = (
    *("config.yaml", "config.resolved.json", "metrics.jsonl", "tensorboard", "report.html"),
    *("ops.json", "fp8.json", "samples", "books.jsonl", "rollouts", "nonfinite", "checkpoints"),
)


@dataclass(frozen=True)
class RunDir:
    """``launch``: one start of the run; its ranks share it, an earlier or a refused start has
    another.
    """

    root: Path
    launch: str = "0"

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def resolved_config(self) -> Path:
        return self.root / "config.resolved.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def errors(self) -> Path:
        return self.root / "errors" / self.launch

    def torchrun_logs(self) -> list[Path]:
        """What torchrun said in this start, one file a node."""
        return sorted(self.logs.glob(f"torchrun_{self.launch}_*.log"))

    def last_launch(self) -> "RunDir":
        """The same directory, of the newest start that left an error."""
        launches = sorted((self.root / "errors").glob("*"), key=lambda p: p.stat().st_mtime)
        return RunDir(self.root, launches[-1].name) if launches else self

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def ops(self) -> Path:
        return self.root / "ops.json"

    @property
    def fp8(self) -> Path:
        return self.root / "fp8.json"

    @property
    def samples(self) -> Path:
        return self.root / "samples"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def nonfinite(self) -> Path:
        return self.root / "nonfinite"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def books(self) -> Path:
        return self.root / "books.jsonl"

    @property
    def key(self) -> Path:
        return self.root / "server.key"

    def server(self, label: int | str) -> Path:
        return self.root / f"server_{label}.json"

    def holds_a_run(self) -> bool:
        return self.config.exists() or self.metrics.exists() or self.checkpoints.exists()

    def set_aside(self) -> Path | None:
        """Makes room for a run from the start: what a run has recorded moves to a folder of
        ``attempts/``; logs, errors and what servers need stay. None if there is nothing.
        """
        there = [self.root / name for name in _OF_A_RUN if (self.root / name).exists()]
        if not there:
            return None
        count = len(list((self.root / "attempts").glob("*")))
        folder = self.root / "attempts" / str(count + 1)
        folder.mkdir(parents=True)
        for path in there:
            path.rename(folder / path.name)
        return folder

    def record_error(self, rank: int, where: str, error: BaseException) -> None:
        """The file ``megarl first-error`` looks for; of a rank's errors the first is kept."""
        path = self.errors / f"rank_{rank}.json"
        if path.exists():
            return
        write_json(
            path,
            {
                "time": time.time(),
                "rank": rank,
                "host": socket.gethostname(),
                "where": where,
                "error": type(error).__name__,
                "message": str(error),
                "lasting": isinstance(error, LASTING),
                "traceback": "".join(traceback.format_exception(error)),
            },
        )

    def lock(self) -> IO[str]:
        """Own the directory until the returned file is closed (the system lets go if the process
        dies).

        Raises RunError naming the holder when another live process has it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        handle = (self.root / "run.lock").open("a+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            handle.seek(0)
            holder = handle.read().strip() or "an unnamed process"
            handle.close()
            raise RunError(
                f"{self.root} is in use by {holder}; set run.dir to another directory, or end it"
            ) from e
        handle.truncate(0)
        handle.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        handle.flush()
        return handle


def write_json(path: Path, value: Any) -> None:
    """Write whole or not at all: readers never see half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, path)


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
