#!/usr/bin/env python3
"""Train a tiny mixture of experts with RL while the rollout server's weights are not the trainer's.

A cell is one RL run of the demo's task from one warmed-up model: an objective, a condition of the
server's weights, a routing replay, a correction and a seed. Its condition is made on the way of the
weights to the server; everything else is megarl as anyone runs it::

    python tools/moe_stability.py --out runs/stability --seeds 3      # resumes; ends with the plots
    python tools/moe_stability.py --out /tmp/quick --quick            # two short cells
    python tools/moe_stability.py --out runs/stability --json         # the summary alone

Under --out: ``cells/NAME/`` (a run each), ``metrics.csv`` (a line a cell and step), a summary and
plots. docs/moe-stability.md says what they show.
"""

import argparse
import csv
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS, QUICK_STEPS = 30, 3
WARMUP_STEPS, QUICK_WARMUP_STEPS = 400, 60
MITIGATED_SEEDS = 2  # at most
LAST = 5  # steps whose mean is a run's result


@dataclass(frozen=True)
class Condition:
    """What the server has instead of the trainer's weights. ``noise``: Gaussian, relative to a
    tensor's root mean square, other in every push. ``lag``: training steps that it is behind.
    ``settings``: of the server, as anyone may give them.
    """

    noise: float = 0.0
    lag: int = 0
    settings: tuple[str, ...] = ()


CONDITIONS = {
    "exact": Condition(),
    "fp8": Condition(settings=("rollout.fp8=f32",)),
    "noise": Condition(noise=0.05),
    "stale": Condition(lag=4),
}
OBJECTIVES = ("grpo", "gspo", "sapo", "aspo")
REPLAYS = {"none": "none", "R2": "old_logprobs", "R3": "rollout"}
CORRECTIONS = ("none", "tis", "icepop")
MITIGATIONS = (("R2", "none"), ("R3", "none"), ("none", "tis"), ("none", "icepop"), ("R3", "tis"))
SETTINGS = (  # of every cell, besides its files
    *("parallel={dp: 1, ep: 1}", "algo.minibatches=2"),
    *("monitor.samples_per_step=0", "monitor.tensorboard=false", "monitor.moe_layers=true"),
)
METRICS = (
    *(
        "rollout/accuracy",
        "eval/accuracy",
        "rollout/reward",
        "rollout/response_length",
        "policy/entropy",
    ),
    *("mismatch/kl_rollout_train_k3", "mismatch/abs_logprob_diff", "mismatch/max_abs_logprob_diff"),
    *("mismatch/ess", "mismatch/chi2_seq", "moe/replay_changed", "moe/load_max_violation"),
    *("moe/router_entropy", "policy/clipfrac_high", "policy/clipfrac_low", "policy/clipfrac_dual"),
    *("policy/seq_clipfrac", "policy/gate", "policy/gatefrac_low", "policy/ratio_ess"),
    *("policy/seq_ratio_distance", "policy/seq_gates_differ", "policy/approx_kl_k3"),
    *("correction/kept_tokens", "correction/weight_mean", "correction/weight_std"),
    *("optim/grad_norm", "optim/skipped", "time/step"),
)


@dataclass(frozen=True)
class Cell:
    objective: str
    condition: str
    replay: str = "none"
    correction: str = "none"
    seed: int = 0

    @property
    def name(self) -> str:
        return "-".join(map(str, asdict(self).values()))


def study(seeds: int) -> list[Cell]:
    """Every objective under every condition; then the mitigations of every condition that is not
    exact, with a token-level objective and a sequence-level one; then, with the others, what weighs
    the gradient by staleness.
    """
    plain = [Cell(o, c, seed=s) for s in range(seeds) for o in OBJECTIVES for c in CONDITIONS]
    mitigated = [
        Cell(o, c, replay, correction, s)
        for s in range(min(seeds, MITIGATED_SEEDS))
        for o in ("grpo", "gspo")
        for c in CONDITIONS
        if c != "exact"
        for replay, correction in MITIGATIONS
    ]
    corrected = [
        Cell(o, "stale", "none", correction, s)
        for s in range(min(seeds, MITIGATED_SEEDS))
        for o in ("sapo", "aspo")
        for correction in ("tis", "icepop")
    ]
    return plain + mitigated + corrected


QUICK = [Cell("grpo", "noise", "R3", "tis"), Cell("sapo", "stale")]


# ---- the weights on their way to the server (in a cell's process)


class Changed:
    """The trainer's weights as a condition has them: a ``WeightSource`` around its own."""

    def __init__(self, weights: Any, condition: Condition, seed: int) -> None:
        self.weights, self.condition, self.seed = weights, condition, seed
        self.pushes = 0
        self.kept: deque[list[tuple[str, Any]]] = deque(maxlen=condition.lag + 1)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """The first push is that of the weights both start from, whatever the lag."""
        self.kept.append([(name, tensor.clone()) for name, tensor in self.weights.tensors()])
        self.pushes += 1
        for name, tensor in self.kept[0]:
            yield name, self._changed(name, tensor)

    def _changed(self, name: str, tensor: Any) -> Any:
        import torch

        if not self.condition.noise:
            return tensor
        seed = hash_of(self.seed, self.pushes, name)
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        return tensor + self.condition.noise * tensor.square().mean().sqrt() * noise


def hash_of(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def run_cell(condition: Condition, seed: int, arguments: list[str]) -> int:
    """``python -m megarl.train`` with another way of the weights."""
    from megarl import sources, train

    class ChangedSource(sources.RolloutSource):
        def __init__(self, run: sources.Surroundings) -> None:
            weights = Changed(run.actor.weights(), condition, seed)
            run.actor.weights = lambda: weights  # type: ignore[method-assign, assignment]
            super().__init__(run)

    sources.SOURCES["rl"] = ChangedSource
    return train.main(arguments)


# ---- the study


@dataclass(frozen=True)
class Study:
    out: Path
    steps: int
    warmup_steps: int

    @property
    def start(self) -> Path:
        return self.out / "start"

    def prepare(self) -> None:
        """Model, problems and warm-up, once."""
        stamp = self.start / "prepared.json"
        wanted = {"warmup_steps": self.warmup_steps}
        if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
            return
        shutil.rmtree(self.start, ignore_errors=True)
        model, megatron = self.start / "model", self.start / "megatron"
        command("tools/make_tiny_model.py", model)
        command("tools/make_demo_data.py", self.start / "data")
        command("tools/convert_hf_to_megatron.py", model, megatron)
        command(
            *("-m", "megarl.train", "configs/quickstart_warmup.yaml"),
            *(f"run.dir={self.start / 'warmup'}", f"run.steps={self.warmup_steps}"),
            *("parallel={dp: 1, ep: 1}", f"model.hf={model}", f"model.load={megatron}"),
            f"data.demonstrations={self.start / 'data' / 'warmup.jsonl'}",
        )
        stamp.write_text(json.dumps(wanted))

    def arguments(self, cell: Cell) -> list[str]:
        files = ["configs/quickstart.yaml", f"configs/algos/{cell.objective}.yaml"]
        if cell.correction != "none":
            files.append(f"configs/corrections/{cell.correction}.yaml")
        checkpoint = self.start / "warmup" / "checkpoints" / f"step_{self.warmup_steps}"
        return [
            *files,
            *SETTINGS,
            *CONDITIONS[cell.condition].settings,
            *(f"run.dir={self.run_of(cell)}", f"run.seed={cell.seed}", f"run.steps={self.steps}"),
            *(f"model.hf={self.start / 'model'}", f"model.load={checkpoint}"),
            *(f"data.{name}={self.start / 'data' / name}.jsonl" for name in ("prompts", "heldout")),
            f"eval.every={self.steps}",
            *([f"moe.routing_replay={REPLAYS[cell.replay]}"] if cell.replay != "none" else []),
        ]

    def run_of(self, cell: Cell) -> Path:
        return self.out / "cells" / cell.name

    def run(self, cell: Cell) -> dict[str, Any]:
        """Of a finished cell what it left; one that failed or was changed runs again."""
        folder, arguments = self.run_of(cell), self.arguments(cell)
        stamp = json.loads(json.dumps([arguments, asdict(CONDITIONS[cell.condition])]))
        done = folder / "cell.json"
        if done.is_file():
            found: dict[str, Any] = json.loads(done.read_text())
            if found["exit_code"] == 0 and found["stamp"] == stamp:
                return found
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.parent / f"{cell.name}.log"
        begin, cpu = time.monotonic(), cpu_seconds()
        with log.open("w") as output:
            code = subprocess.run(
                [sys.executable, __file__, "--cell", json.dumps(asdict(cell)), *arguments],
                **{"cwd": ROOT, "stdout": output, "stderr": subprocess.STDOUT},
            ).returncode
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        found = {
            "cell": asdict(cell),
            "exit_code": code,
            "seconds": round(time.monotonic() - begin, 1),
            "cpu_seconds": round(cpu_seconds() - cpu, 1),
            "stamp": stamp,
            "steps": read_steps(folder / "metrics.jsonl"),
        }
        folder.mkdir(parents=True, exist_ok=True)
        done.write_text(json.dumps(found))
        return found


def cpu_seconds() -> float:
    """Of all processes that have ended: trainers and their servers."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command(*words: object) -> None:
    print(f"$ python {' '.join(map(str, words))}", flush=True)
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True)


def read_steps(path: Path) -> list[dict[str, float]]:
    """The chosen metrics of every training step."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: row[k] for k in ("step", *METRICS) if k in row} for row in rows if row["step"]]


def write_csv(path: Path, cells: Iterable[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*Cell.__dataclass_fields__, "step", *METRICS])
        writer.writeheader()
        for found in cells:
            writer.writerows({**found["cell"], **step} for step in found["steps"])


def finished(out: Path) -> list[dict[str, Any]]:
    """What the cells under ``out`` left so far, by name."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("cells/*/cell.json"))]


def summary(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for every cell: means of its last steps; of mismatches and replays of all steps."""
    lines = []
    for found in cells:
        steps = found["steps"]
        line = {**found["cell"]}
        line |= {name: found[name] for name in ("exit_code", "seconds", "cpu_seconds")}
        for name in METRICS:
            whole = name.startswith(("mismatch/", "moe/replay"))
            values = [s[name] for s in (steps if whole else steps[-LAST:]) if name in s]
            if values:
                line[name] = sum(values) / len(values)
        lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true", help="two cells of three steps")
    parser.add_argument("--json", action="store_true", help="print the summary of what is done")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args, arguments = parser.parse_known_args()
    if args.cell is not None:
        cell = Cell(**json.loads(args.cell))
        return run_cell(CONDITIONS[cell.condition], cell.seed, arguments)
    if arguments:
        parser.error(f"not understood: {' '.join(arguments)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = args.out.resolve()
    if args.json:
        print(json.dumps(summary(finished(out)), indent=1))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    steps, warmup = (QUICK_STEPS, QUICK_WARMUP_STEPS) if args.quick else (args.steps, WARMUP_STEPS)
    return conduct(Study(out, steps, warmup), QUICK if args.quick else study(args.seeds))


def conduct(whole: Study, cells: list[Cell]) -> int:
    """The exit code: 1 if a cell failed."""
    whole.prepare()
    results = []
    for number, cell in enumerate(cells, 1):
        found = whole.run(cell)
        accuracy = [s["rollout/accuracy"] for s in found["steps"][-LAST:]]
        end = f"accuracy {sum(accuracy) / len(accuracy):.3f}" if accuracy else "no step"
        failed = f", exit code {found['exit_code']}" if found["exit_code"] else ""
        took = f"{found['seconds']:.0f} s"
        print(f"{number}/{len(cells)} {cell.name}: {end}, {took}{failed}", flush=True)
        results.append(found)
    write_csv(whole.out / "metrics.csv", results)
    (whole.out / "summary.json").write_text(json.dumps(summary(results), indent=1) + "\n")
    from stability_plots import write_plots

    write_plots(whole.out, results)
    return int(any(found["exit_code"] for found in results))


if __name__ == "__main__":
    sys.exit(main())
