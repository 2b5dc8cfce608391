"""The servers of bench_sync.py, started as a run starts its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.rollout import RolloutSection
from megarl.rollout.fleet import start_fleet
from megarl.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent
_NEVER_S = 1e6
# What the real SGLang needs in order to run without a GPU: with the tests of it.
_CPU_SUPPORT = ROOT / "tests" / "sglang" / "support"
_CPU_ARGUMENTS = [
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--cuda-graph-backend-decode",
    "disabled",
    "--cuda-graph-backend-prefill",
    "disabled",
    "--max-total-tokens",
    "2048",
    "--max-running-requests",
    "2",
    "--sleep-on-idle",
]


@dataclass(frozen=True)
class Engine:
    """``venv``: of SGLang; None: embedded servers."""

    venv: Path | None
    dtype: str

    def section(self, servers: int) -> dict[str, Any]:
        """Of the settings of a run."""
        common = {"servers": servers, "context_length": 64, "probe_every_s": _NEVER_S}
        if self.venv is None:
            return {**common, "engine": "embedded", "max_running": 2}
        arguments = [] if torch.cuda.is_available() else _CPU_ARGUMENTS
        return {
            **common,
            "engine": "sglang",
            "start_timeout_s": 600.0,
            "server_command": (str(self.venv / "bin" / "python"), "-m", "sglang.launch_server"),
            "server_args": ("--skip-tokenizer-init", "--skip-server-warmup", *arguments),
        }


@contextmanager
def started(
    engine: Engine, model: Path, folder: Path, count: int
) -> Iterator[list[dict[str, Any]]]:
    """What trainer ranks need to know of each: arguments of ServerControl, and its ``pid``."""
    if engine.venv is not None and not torch.cuda.is_available():
        os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        os.environ["PYTHONPATH"] = f"{_CPU_SUPPORT}:{ROOT}"
    deaths: list[Any] = []
    fleet = start_fleet(
        RolloutSection(**engine.section(count)),
        run_dir=RunDir(folder),
        model=model,
        dtype=engine.dtype,
        on_death=deaths.append,
    )
    try:
        with fleet.hold():
            pids = {server.name: server.process.pid for server in fleet.managed}
            yield [
                {
                    "url": member.url,
                    "key": fleet.key,
                    "name": member.name,
                    "ranks": member.ranks,
                    "boot": member.boot,
                    "version": member.version,
                    "pid": pids[member.name],
                }
                for member in fleet.members()
            ]
    finally:
        fleet.close()
    if deaths:
        raise RuntimeError(f"servers died: {deaths}")
