"""A step of many long samples with routing tables, sized for trainers of any size on one core.

    .venv/bin/python tools/simulate_scale.py [--json FILE] [--samples 16384] [--median 2500] ...

Makes up the facts of the samples and hands them to what a run plans and moves with: ``plan_steps``,
``Moves`` (data/moves.py, whose bytes are those that the exchange moves: tests/tools/
test_simulate_scale.py), the facts' JSON, ``build_row``, ``complete_plan``. No process group, no
tokens, no weights: arithmetic for every rank, and times of what this process did itself or of what
``scale_rates.py`` measures here. Rates of networks are assumed (``ASSUMED``). docs/scale.md tells
what comes out.

Lengths are log-normal with ``--median`` and ``--sigma``, from 64 to ``--longest`` tokens; with
``--sigma 0 --median 8192`` every sample is as long as it may be.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scale_rates import measure
from scale_sizes import Step, facts_cost, made_up_facts, made_up_lengths
from scale_statistics import Statistics, statistics

from megarl.config.schema import Config
from megarl.plan.job import Job, layout_of, read_job
from megarl.types import RoutingShape

ROOT = Path(__file__).parents[1]
ASSUMED = {"nic": 50e9, "http_nic": 12.5e9}  # bytes a second of a node: 400 Gb/s, 100 GbE
# Model -> GPUs -> its layout; none of it matters here but tp, cp, pp and dp
LAYOUTS: Mapping[str, Mapping[int, str]] = {
    "deepseek-v3": {
        1: "tp=1 pp=1 cp=1 ep=1 last_layers=null",
        64: "tp=8 pp=8 cp=1 ep=8 last_layers=5",
        1024: "tp=8 pp=8 cp=1 ep=64 last_layers=5",
    },
    "qwen3-235b-a22b": {
        1: "tp=1 pp=1 cp=1 ep=1 last_layers=null",
        64: "tp=4 pp=8 cp=2 ep=8 last_layers=3",
        1024: "tp=4 pp=8 cp=2 ep=8 last_layers=3",
    },
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    given = _arguments(arguments)
    torch.set_num_threads(1)
    lengths = made_up_lengths(given.samples, given.median, given.sigma, given.longest, given.seed)
    said = statistics(_small_config)
    found: dict[str, Any] = {
        "samples": len(lengths),
        "tokens": sum(lengths),
        "assumed": ASSUMED,
        "statistics": asdict(said),
        "models": {},
    }
    for name in given.models:
        spec = _job(name, 1, given.samples).spec
        shape = RoutingShape(spec.moe_layers, spec.topk, spec.experts)
        if not given.sizes_only and "rates" not in found:
            found["rates"] = measure(shape, given.rate_mb)
        of_model: dict[str, Any] = {"facts": facts_cost(made_up_facts(lengths, shape))}
        for gpus in given.gpus:
            job = _job(name, gpus, given.samples)
            step = Step.planned(lengths, shape, job.config, layout_of(job), job.spec)
            sized = step.sized()
            if "rates" in found:
                cost = Cost(step, sized, of_model["facts"], said, found["rates"])
                sized["seconds"] = cost.seconds()
            of_model[str(gpus)] = sized
        found["models"][name] = of_model
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")
    _print(found)
    return found


# --- seconds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    step: Step
    sized: dict[str, Any]
    facts: dict[str, float]
    statistics: Statistics
    rates: Mapping[str, float]

    def seconds(self) -> dict[str, float]:
        """Of the busiest collector, leader or rank. The first three go on while samples are
        sampled.
        """
        n, rates, nodes = self.sized["bytes"], self.rates, self.sized["nodes"]
        world = len(self.step.moves.of_rank)
        moved = max(n["leader_sends"], n["leader_gets"])
        depth = math.ceil(math.log2(world)) if world > 1 else 0
        said = self.statistics
        told = said.bytes_of_a_row * self.step.rows * self.step.moves.mesh.dp
        told += said.bytes_of_a_rank * world
        there_and_back = 4 * depth * rates["gloo_hop_s"]  # sizes, then bytes: up and down the tree
        return {
            "http": n["http_of_a_collector"] / ASSUMED["http_nic"],
            "base64_and_narrow": n["http_of_a_collector"] / rates["base64_and_narrow"],
            "collector_to_leader": n["collector_to_leader"] / rates["local_socket"],
            "facts": self.facts["encode_s"] / nodes
            + there_and_back
            + 2 * depth * self.facts["bytes"] / rates["gloo"]
            + self.facts["decode_s"],
            "plan": self.step.plan_s + self.sized["moves_s"],
            "between_leaders_assumed_nic": moved / ASSUMED["nic"],
            "between_leaders_gloo_here": moved / rates["gloo"],
            "shared_memory": n["shared_on_a_node"] / rates["memfd_write"]
            + max(n["rank_gets_by_stage"]) / rates["memfd_read"],
            "rows": max(n["rows_of_a_rank"]) / rates["memory_copy"],
            "statistics": said.calls * there_and_back + told / rates["json_parse"],
            "metrics": said.metrics_s * world,
        }


# --- the program ----------------------------------------------------------------------------------


def _job(model: str, gpus: int, samples: int, per_prompt: int = 16, *others: str) -> Job:
    """With as much memory as it takes: what a GPU holds is docs/plan.md's subject."""
    files = [f"models/{model}.yaml", "algos/gspo.yaml"]
    settings = [str(ROOT / "configs" / name) for name in files]
    settings += [f"parallel.{part}" for part in LAYOUTS[model][gpus].split()]
    settings += [f"data.prompts_per_step={samples // per_prompt}", "moe.routing_replay=rollout"]
    settings += [f"data.samples_per_prompt={per_prompt}", *others]
    return read_job(settings, gpus=gpus, gpu_gib=1e5, sample_tokens=None)


def _small_config(samples: int) -> Config:
    correction = ("algo.correction.level=sequence", "algo.correction.high=2.0")
    return _job("deepseek-v3", 1, samples, 4, "train.row_tokens=32", *correction).config


def _print(found: Mapping[str, Any]) -> None:
    print(f"{found['samples']} samples, {found['tokens']:,} tokens")
    print(json.dumps({k: found[k] for k in ("statistics", "rates") if k in found}, indent=1))
    for model, sizes in found["models"].items():
        for gpus, of in sizes.items():
            print(f"\n{model}, {gpus}")
            for area, values in of.items() if gpus != "facts" else ():
                if isinstance(values, dict) and area != "layout":
                    print(
                        *(f"  {area} {name}: {_shown(v)}" for name, v in values.items()), sep="\n"
                    )
                else:
                    print(f"  {area}: {values}")
        print(f"  facts: {sizes['facts']}")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.3g} s" if isinstance(value, float) else f"{value / 1e9:.3f} GB"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--median", type=float, default=2500)
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--models", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--sizes-only", action="store_true", help="measure no rates")
    parser.add_argument("--rate-mb", type=int, default=256, help="that each measurement moves")
    parser.add_argument("--json", help="file for everything that was found")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
