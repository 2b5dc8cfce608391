"""Whole runs, started as a user starts them: ``launch/local.sh CONFIG key=value``."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import ROOT


@dataclass(frozen=True)
class Inputs:
    """A tiny model in both formats, and problems."""

    hf: Path
    megatron: Path
    data: Path

    def rl(self, run: Path, *overrides: str) -> list[str]:
        return [
            "configs/quickstart.yaml",
            f"run.dir={run}",
            f"model.hf={self.hf}",
            f"model.load={self.megatron}",
            f"data.prompts={self.data}/prompts.jsonl",
            f"data.heldout={self.data}/heldout.jsonl",
            "data.prompts_per_step=8",
            "optim.warmup_steps=2",
            "data.reward=import:tests.e2e.rewards:brevity",
            *overrides,
        ]

    def train_only(self, run: Path, recorded: Path, *overrides: str) -> list[str]:
        return [
            "configs/algos/gspo.yaml",
            "run.mode=train_only",
            f"run.dir={run}",
            f"model.hf={self.hf}",
            f"model.load={self.megatron}",
            f"data.recorded={recorded}",
            "parallel={dp: 2, ep: 2}",
            "precision.dtype=fp32",
            "algo.minibatches=2",
            "optim={lr: 1.0e-4, betas: [0.9, 0.98], warmup_steps: 2}",
            *overrides,
        ]

    def sft(self, run: Path, *overrides: str) -> list[str]:
        return [
            "configs/quickstart_warmup.yaml",
            f"run.dir={run}",
            f"model.hf={self.hf}",
            f"model.load={self.megatron}",
            f"data.demonstrations={self.data}/warmup.jsonl",
            "data.prompts_per_step=16",
            "optim.warmup_steps=0",
            "optim.decay_fraction=0",
            "optim.min_lr_ratio=0",
            *overrides,
        ]


@dataclass
class Launch:
    """A run in progress."""

    process: subprocess.Popen[str]
    run: Path
    output: Path

    def text(self) -> str:
        return self.output.read_text()

    def wait_for_steps(self, timeout_s: float = 120.0) -> None:
        """Until a training step is reported (not every one is: lines come every two seconds)."""
        deadline = time.monotonic() + timeout_s
        while not re.search(r"^step [1-9]\d*/", self.text(), re.MULTILINE):
            assert self.process.poll() is None, f"ended before a step:\n{self.text()}"
            assert time.monotonic() < deadline, f"no step in {timeout_s} s:\n{self.text()}"
            time.sleep(0.1)

    def wait(self, timeout_s: float = 240.0) -> int:
        return self.process.wait(timeout_s)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs for this run directory: ranks, torchrun, servers."""
        found = []
        for p in psutil.process_iter(["cmdline"]):
            if any(str(self.run) in word for word in p.info["cmdline"] or []):
                found.append(p)
        return found

    def processes_of(self, module: str) -> list[psutil.Process]:
        """Of the run's processes those that run ``module``, and children of its ranks that do."""
        found = {p.pid: p for p in self.processes()}
        for p in list(found.values()):
            with contextlib.suppress(psutil.Error):
                found |= {child.pid: child for child in p.children(recursive=True)}
        own = []
        for p in found.values():
            with contextlib.suppress(psutil.Error):
                own += [p] if module in p.cmdline() else []
        return own

    def rank(self, local_rank: int) -> psutil.Process:
        ranks = [
            p
            for p in self.processes()
            if "megarl.train" in p.cmdline() and p.environ().get("LOCAL_RANK") == str(local_rank)
        ]
        assert len(ranks) == 1, ranks
        return ranks[0]

    def server(self) -> psutil.Process:
        return psutil.Process(json.loads((self.run / "server_0.json").read_text())["pid"])

    def metrics(self) -> list[dict[str, Any]]:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def assert_nothing_left(self) -> None:
        left = [p.cmdline() for p in self.processes() if p.status() != psutil.STATUS_ZOMBIE]
        assert not left, left


@pytest.fixture(scope="session")
def inputs(tiny_model: Path, demo_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    megatron = tmp_path_factory.mktemp("megatron") / "checkpoint"
    tool = str(ROOT / "tools" / "convert_hf_to_megatron.py")
    command = [sys.executable, tool, str(tiny_model), str(megatron)]
    subprocess.run(command, check=True, timeout=180)
    return Inputs(tiny_model, megatron, demo_data)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start ``launch/local.sh``; whatever still runs at the end of the test is ended by pid."""
    started: list[Launch] = []

    def start(arguments: list[str], *, wrap: tuple[str, ...] = ()) -> Launch:
        run = Path(next(a for a in arguments if a.startswith("run.dir=")).removeprefix("run.dir="))
        output = tmp_path / f"output_{len(started)}.txt"
        with output.open("w") as out:
            process = subprocess.Popen(
                [*wrap, "launch/local.sh", *arguments],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHON": sys.executable},
            )
        started.append(Launch(process, run, output))
        return started[-1]

    yield start
    for item in started:
        if item.process.poll() is None:
            os.killpg(item.process.pid, signal.SIGKILL)
            item.process.wait()
        for p in item.processes():
            p.kill()
