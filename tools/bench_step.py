"""What a train step costs beyond Megatron's own: ours beside a bare loop, in one run.

    .venv/bin/python tools/bench_step.py [--repeats 9] [--json FILE] [--hidden 512 ...]

ours  samples -> plan, rows, advantages and weights; every row to the device, forward and backward
      with log-probs, entropy, objective and its metrics; the check for numbers that are not
      finite; optimizer; metrics reduced. The pass for old log-probs is left out.
bare  the same model and optimizer on the same rows, which lie on the device already: Megatron's
      schedule with GPTModel's own cross-entropy, its mean over the trained tokens, and the
      optimizer. Nothing else.

Both run in turn, the one that is first alternating. ``overhead`` is the ratio of the fastest of
each, minus 1; ``overhead_median`` that of the medians; ``overhead_cpu`` is of the process's own
CPU time, which other processes disturb less. ``noise`` says how far the median of the bare loop is
above its fastest: where it is not small, believe ``overhead_cpu``. Phases are of one more step of
ours under torch's profiler, which slows what has many small operations.

The model is a Qwen3-MoE with random weights, in one process, on the GPU where there is one.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megarl.actor.actor import MegatronActor, build_actor
from megarl.actor.attention_packed import packed_seq_params
from megarl.actor.setup import init_parallel
from megarl.actor.step import LOGPROBS, LOSS, TO_DEVICE, record_old
from megarl.algos.control import Controllers
from megarl.config.schema import Config
from megarl.experience import complete_plan, make_plan
from megarl.mesh import Mesh
from megarl.models.flops import pass_flops
from megarl.models.hf_write import write_checkpoint
from megarl.models.mapping import mapping_for
from megarl.models.spec import read_spec
from megarl.monitor.metrics import reduce_metrics
from megarl.types import PackedBatch, Sample, TrainPlan

SIZES = {  # option -> (default, key of config.json)
    "hidden": (512, "hidden_size"),
    "layers": (4, "num_hidden_layers"),
    "heads": (8, "num_attention_heads"),
    "kv-heads": (4, "num_key_value_heads"),
    "head-dim": (64, "head_dim"),
    "experts": (8, "num_experts"),
    "topk": (2, "num_experts_per_tok"),
    "moe-ffn": (512, "moe_intermediate_size"),
    "vocab": (8192, "vocab_size"),
}
ALGO = {
    "policy": {"name": "ppo_clip"},
    "advantage": {"name": "grpo"},
    "aggregation": {"name": "token_mean"},
    "old_logprobs": "rollout",  # no pass for them
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    given = _arguments(arguments)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench.of(given, Path(folder))
    found = measure(bench, given.repeats)
    sizes = {name: getattr(given, name.replace("-", "_")) for name in SIZES}
    found |= {"model": sizes, "threads": given.threads, "phases": bench.phases()}
    found |= {"rows": [len(row.tokens) for row in bench.rows], "device": bench.device.type}
    _print(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    return found


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, key) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=key)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16, help="in groups of 4")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Bench:
    """One actor, a step of samples, and its rows as the bare loop has them."""

    actor: MegatronActor
    config: Config
    samples: list[Sample]
    rows: list[PackedBatch]

    @classmethod
    def of(cls, given: argparse.Namespace, folder: Path) -> "Bench":
        config = _config(given, write_model(given, folder))
        parallel = init_parallel(Mesh(), seed=0, timeout_s=600)
        actor = build_actor(config, read_spec(config.model.hf), parallel, optimizer_steps=1000)
        samples = random_samples(given)
        bench = cls(actor, config, samples, [])
        (rows,) = bench.plan().steps
        bench.rows.extend(rows)
        bench.check()
        return bench

    @property
    def device(self) -> torch.device:
        return self.actor.parallel.device

    def plan(self) -> TrainPlan:
        return make_plan(self.samples, self.config, Mesh(), 0, pass_flops(self.actor.spec))

    def ours(self) -> None:
        with record_function("pack"):
            plan = self.plan()
        with record_function("advantages"):
            controllers = Controllers.of(self.config.algo)
            metrics = complete_plan(plan, self.samples, self.config, controllers)
        metrics += self.actor.train(plan)
        with record_function("metrics"):
            assert reduce_metrics([metrics])["optim/skipped"] == 0

    def bare(self) -> float:
        """The mean cross-entropy of the step."""
        losses = self.forward_backward(self.on_device)
        ok, _, _ = self.actor.optimizer.step()
        assert ok
        self.actor.schedule.step(increment=1)
        return sum(losses)

    @cached_property
    def on_device(self) -> list[tuple[torch.Tensor, ...]]:
        """(tokens, positions, targets, mask, bounds) of every row."""
        return [
            tuple(
                x.to(self.device)
                for x in (row.tokens, row.positions, row.targets, row.mask, row.cu_seqlens)
            )
            for row in self.rows
        ]

    def forward_backward(self, rows: list[tuple[torch.Tensor, ...]]) -> list[float]:
        """The loop that Megatron's own documentation shows; the loss of every row."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        trained = sum(int(mask.sum()) for *_, mask, _ in rows)

        def forward_step(source: Iterator[tuple[torch.Tensor, ...]], core: Any) -> Any:
            tokens, positions, targets, mask, bounds = next(source)
            losses = core(
                *(tokens[None], positions[None], None),
                labels=targets[None],
                packed_seq_params=packed_seq_params(bounds),
            )

            def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, float]:
                loss = (output.float().view(-1) * mask).sum() / trained
                return loss * len(rows), float(loss.detach())

            return losses, loss_func

        for chunk in self.actor.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.actor.optimizer.zero_grad()
        found: list[float] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rows),
            model=self.actor.model,
            num_microbatches=len(rows),
            seq_length=max(len(row[0]) for row in rows),
            micro_batch_size=1,
            forward_only=False,
        )
        return found

    def check(self) -> None:
        """Both see the same tokens: the bare loss is minus the mean of our log-probs."""
        self.actor.record(self.rows, self.actor._of_logprobs(record_old(self.actor.parallel)))
        total, count = 0.0, 0
        for row in self.rows:
            assert row.old_logprobs is not None
            total += float(row.old_logprobs[row.mask].double().sum())
            count += int(row.mask.sum())
        bare = sum(self.forward_backward(self.on_device))
        assert abs(bare + total / count) < 1e-2, (bare, -total / count)

    def phases(self) -> dict[str, float]:
        """Seconds of one profiled step of ours, by what they are spent on."""
        actor, ranged = self.actor, {"update": "optimizer", "_must_skip": "finite_check"}
        methods = {name: getattr(actor, name) for name in [*ranged, "gradients"]}
        for name, method in methods.items():
            setattr(actor, name, _in_range(ranged.get(name, name), method))
        try:
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                start = time.perf_counter()
                self.ours()
                self.synchronize()
                total = time.perf_counter() - start
        finally:
            for name in methods:
                delattr(actor, name)
        seconds = {e.key: e.cpu_time_total / 1e6 for e in profiled.key_averages()}
        phases = {
            name: seconds.get(name, 0.0)
            for name in ("pack", "advantages", "finite_check", "optimizer", "metrics")
        }
        phases["to_device"] = seconds.get(TO_DEVICE, 0.0)
        for name, both in (
            ("logprobs", (LOGPROBS, "_LogprobEntropyBackward")),
            ("loss", (LOSS, "_ClosedFormBackward")),
        ):
            phases[name] = sum(seconds.get(key, 0.0) for key in both)
        inside = sum(phases[name] for name in ("to_device", "logprobs", "loss"))
        phases["forward_backward"] = seconds["gradients"] - inside
        return {**phases, "total": total}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    sides: dict[str, Callable[[], object]] = {"ours": bench.ours, "bare": bench.bare}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for k in range(repeats + 1):
        for name in sorted(sides, reverse=bool(k % 2)):
            start, start_cpu = time.perf_counter(), time.process_time()
            sides[name]()
            bench.synchronize()
            if k:  # the first of each warms up
                cpu[name].append(time.process_time() - start_cpu)
                wall[name].append(time.perf_counter() - start)

    def ratio(times: dict[str, list[float]], of: Callable[[list[float]], float]) -> float:
        return of(times["ours"]) / of(times["bare"]) - 1

    return {
        "overhead": ratio(wall, min),
        "overhead_median": ratio(wall, statistics.median),
        "overhead_cpu": ratio(cpu, min),
        "noise": statistics.median(wall["bare"]) / min(wall["bare"]) - 1,
        "seconds": {name: min(times) for name, times in wall.items()},
        "wall": wall,
        "cpu": cpu,
    }


def _in_range(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return method(*args, **kwargs)

    return inside


def write_model(given: argparse.Namespace, folder: Path) -> Path:
    """A Hugging Face folder with random weights."""
    source = folder / "source"
    source.mkdir()
    values: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **{key: getattr(given, name.replace("-", "_")) for name, (_, key) in SIZES.items()},
        "intermediate_size": 4 * given.hidden,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": given.row_tokens,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    (source / "config.json").write_text(json.dumps(values))
    specs = mapping_for(read_spec(source)).hf_spec()
    generator = torch.Generator().manual_seed(0)
    tensors = (
        (spec.name, 0.02 * torch.randn(spec.shape, generator=generator))
        if len(spec.shape) > 1
        else (spec.name, torch.ones(spec.shape))
        for spec in specs
    )
    write_checkpoint(folder / "model", tensors, specs, source)
    return folder / "model"


def _config(given: argparse.Namespace, hf: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused", "mode": "train_only", "steps": 1},
            "model": {"hf": str(hf)},
            "algo": ALGO,
            "optim": {"lr": 1e-5, "distributed": False},
            "precision": {"dtype": given.dtype},
            "train": {"row_tokens": given.row_tokens},
        }
    )


def random_samples(given: argparse.Namespace, seed: int = 0) -> list[Sample]:
    """A quarter of each is its prompt; lengths are between half and all of the longest."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(given.samples):
        length = int(rng.integers(given.longest // 2, given.longest + 1))
        mask = np.arange(length) >= length // 4
        logprobs = np.where(mask, -np.log(given.vocab) + 0.1 * rng.normal(size=length), 0)
        samples.append(
            Sample(
                prompt_id=f"p{i // 4}",
                group=i // 4,
                index=i % 4,
                tokens=rng.integers(2, given.vocab, length).astype(np.int32),
                mask=mask,
                rollout_logprobs=logprobs.astype(np.float32),
                rewards=np.array([i % 3], np.float32),
                correct=i % 3 == 0,
                truncated=False,
            )
        )
    return samples


def _print(found: dict[str, Any]) -> None:
    ours, bare = found["seconds"]["ours"], found["seconds"]["bare"]
    print(f"rows of {found['rows']} tokens on {found['device']}, {found['threads']} threads")
    print(f"ours {ours:.3f} s, bare {bare:.3f} s (fastest of {len(found['wall']['ours'])})")
    shares = {name: found[name] for name in ("overhead", "overhead_median", "overhead_cpu")}
    print(", ".join(f"{name} {share:+.1%}" for name, share in shares.items()))
    print(f"noise {found['noise']:.1%}")
    for name, seconds in sorted(found["phases"].items(), key=lambda item: -item[1]):
        print(f"  {name:18} {seconds:8.4f} s  {seconds / found['phases']['total']:6.1%}")


if __name__ == "__main__":
    main()
    sys.exit(0)
