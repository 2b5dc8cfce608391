"""What deltas save on real training steps: bytes of a push against those of whole tensors.

    .venv/bin/python tools/measure_delta.py [--steps 12] [--lr 1e-6 1e-5] [--json FILE]

A Qwen3-MoE with random weights is trained by the actor as a run trains it: bf16 weights, fp32 main
parameters, AdamW, GRPO on new random samples with random rewards each step. After every step its
weights are pushed, in each form a server may hold them in, through ``megarl/sync/delta.py``: what
the receiving end then has is compared by digest. Form bf16, and FP8 codes with float32 or
power-of-two scales.

For each learning rate and form: ``changed``, the share of elements whose bits differ from those of
the step before; ``bytes``, of payloads, as a share of the tensors'; both over the steps after
``--skip``, whose updates are those of an optimizer that has just begun. ``raw``: the bytes if each
changed element cost its own bytes and 4 of index. ``by_kind``: of parts of the model. Encoding and
applying are timed call by call; GB/s are of the tensors.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_step import SIZES, random_samples, write_model

from megarl.actor.actor import MegatronActor, build_actor
from megarl.actor.setup import init_parallel
from megarl.algos.control import Controllers
from megarl.config.schema import Config
from megarl.experience import complete_plan, make_plan
from megarl.mesh import Mesh
from megarl.models.flops import pass_flops
from megarl.models.fp8_export import SCALES, Fp8Export, fp8_export
from megarl.models.mapping import mapping_for
from megarl.models.spec import ModelSpec, read_spec
from megarl.ops import delta_apply_, delta_encode_, digest
from megarl.sync.delta import Base, decode

DEFAULTS = {"hidden": 512, "moe-ffn": 256, "experts": 16, "topk": 4}
KINDS = {  # part of a name -> what it is called here; the first that fits
    ".experts.": "experts",
    "self_attn.": "attention",
    "embed_tokens": "embeddings",
    "lm_head": "embeddings",
    "": "other",
}
Named = list[tuple[str, Tensor]]


@dataclass
class Count:
    """Elements and bytes of some tensors."""

    elements: int = 0
    changed: int = 0
    whole: int = 0
    payload: int = 0
    raw: int = 0

    @classmethod
    def of(cls, old: Tensor, new: Tensor, payload: Tensor) -> "Count":
        item = new.element_size()
        before, after = (x.reshape(-1).view(torch.uint8).view(-1, item) for x in (old, new))
        changed = int((before != after).any(-1).sum())
        raw = min(changed * (item + 4), new.nbytes)
        return cls(new.numel(), changed, new.nbytes, payload.numel(), raw)

    def add(self, other: "Count") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def shares(self) -> dict[str, float]:
        return {
            "changed": self.changed / self.elements,
            "bytes": self.payload / self.whole,
            "raw": self.raw / self.whole,
        }


@dataclass
class Form:
    """One form's sender and receiver. ``fp8``: None for tensors as they are."""

    fp8: Fp8Export | None
    base: Base = field(default_factory=Base)
    served: dict[str, Tensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, Count] = field(default_factory=lambda: defaultdict(Count))
    steps: list[Count] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"encode": 0.0, "apply": 0.0})

    def push(self, weights: Named, counted: bool) -> None:
        """The first time nothing is held."""
        step = Count()
        for name, tensor in self._tensors(weights):
            held = self.digests.get(name)
            sent = self.base.encode(name, tensor, held)
            place = torch.empty_like(tensor) if held is None else self.served[name]
            if held is not None:
                self._time(place.clone(), place.clone(), tensor)
                count = Count.of(place, tensor, sent.payload)
                step.add(count)
                if counted:
                    self.kinds[_kind(name)].add(count)
            self.served[name] = decode(sent.spec, sent.payload, place, held)
            self.digests[name] = digest(place)
            assert self.digests[name] == sent.digest, name
        if step.elements:
            self.steps.append(step)

    def _tensors(self, weights: Named) -> Named:
        if self.fp8 is None:
            return weights
        return [part for item in weights for part in self.fp8.parts(*item)]  # type: ignore[misc]

    def _time(self, base: Tensor, copy: Tensor, new: Tensor) -> None:
        start = time.perf_counter()
        payload = delta_encode_(base, new)
        middle = time.perf_counter()
        delta_apply_(copy, payload)
        self.seconds["apply"] += time.perf_counter() - middle
        self.seconds["encode"] += middle - start

    def report(self) -> dict[str, Any]:
        total = Count()
        for count in self.kinds.values():
            total.add(count)
        num_bytes = self.base.num_bytes
        timed = num_bytes * len(self.steps)
        return {
            **total.shares(),
            "whole_bytes": num_bytes,
            "by_kind": {kind: count.shares() for kind, count in sorted(self.kinds.items())},
            "by_step": [step.shares() for step in self.steps],
            **{f"{name}_gb_per_s": timed / s / 1e9 for name, s in self.seconds.items()},
        }


def _kind(name: str) -> str:
    return next(kind for part, kind in KINDS.items() if part in name)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    given = _arguments(arguments)
    torch.set_num_threads(given.threads)
    parallel = init_parallel(Mesh(), seed=0, timeout_s=600)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(given, Path(folder))
        spec = read_spec(model)
        for lr in given.lr:
            config = _config(given, model, lr)
            actor = build_actor(config, spec, parallel, optimizer_steps=given.steps)
            results += _run(actor, config, spec, given)
    found = {
        "model": {name: getattr(given, name.replace("-", "_")) for name in SIZES},
        "steps": given.steps,
        "skipped": given.skip,
        "samples": given.samples,
        "betas": list(config.optim.betas),
        "threads": given.threads,
        "results": results,
    }
    _print(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    return found


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, key) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=DEFAULTS.get(name, default), help=key)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4, help="steps that are left out of the shares")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16, help="a step, in groups of 4")
    parser.add_argument("--longest", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if not 0 <= given.skip < given.steps:
        parser.error(f"--skip must be at least 0 and below --steps {given.steps}: {given.skip}")
    return given


def _config(given: argparse.Namespace, model: Path, lr: float) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": "unused", "mode": "train_only", "steps": given.steps},
            "model": {"hf": str(model)},
            "algo": {
                "policy": {"name": "ppo_clip"},
                "advantage": {"name": "grpo"},
                "aggregation": {"name": "token_mean"},
            },
            "optim": {"lr": lr, "distributed": False},
            "precision": {"dtype": "bf16"},
            "train": {"row_tokens": given.row_tokens},
        }
    )


def _run(
    actor: MegatronActor, config: Config, spec: ModelSpec, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Of every form."""
    mapping = mapping_for(spec)
    forms = {"bf16": Form(None)} | {f"fp8 {s}": Form(fp8_export(mapping, s)) for s in SCALES}
    weights = _weights(actor)
    for form in forms.values():
        form.push(weights, counted=False)
    for step in range(given.steps):
        _train(actor, config, given, seed=step)
        weights = _weights(actor)
        for form in forms.values():
            form.push(weights, counted=step >= given.skip)
    return [{"lr": config.optim.lr, "form": n, **form.report()} for n, form in forms.items()]


def _weights(actor: MegatronActor) -> Named:
    """Copies: the actor's own change in place."""
    return [(name, tensor.detach().clone()) for name, tensor in actor.weights().tensors()]


def _train(actor: MegatronActor, config: Config, given: argparse.Namespace, seed: int) -> None:
    samples = random_samples(given, seed)
    plan = make_plan(samples, config, Mesh(), 0, pass_flops(actor.spec))
    actor.logprobs(plan)
    complete_plan(plan, samples, config, Controllers.of(config.algo))
    actor.train(plan)


def _print(found: dict[str, Any]) -> None:
    print(f"{found['model']}, {found['samples']} samples a step")
    print(f"{found['steps']} steps, the first {found['skipped']} not counted")
    print("   lr   form              changed   bytes    raw   encode    apply")
    for row in found["results"]:
        print(
            f"{row['lr']:.0e}  {row['form']:16} {row['changed']:8.2%} {row['bytes']:8.2%} "
            f"{row['raw']:7.2%} {row['encode_gb_per_s']:6.1f} {row['apply_gb_per_s']:6.1f} GB/s"
        )
        for kind, shares in row["by_kind"].items():
            print(f"         {kind:14} {shares['changed']:8.2%} {shares['bytes']:8.2%}")


if __name__ == "__main__":
    main()
    sys.exit(0)
