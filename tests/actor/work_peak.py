"""Worker side of test_logits_peak.py: allocations of a training step and of a log-prob pass."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.actor import actor as actor_module
from megarl.types import Sample
from tests.actor.work import config_for, make_actor, prepare


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor of every dtype that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel[x.dtype] = max(self.numel.get(x.dtype, 0), x.numel())
        return out


@contextmanager
def _fp32_logits() -> Iterator[None]:
    """As upstream's wrapper for bf16 does it when it is not told otherwise."""
    of_logits = actor_module.on_logprobs

    def on_copies(finish: Any, parallel: Any, **options: Any) -> Any:
        inner = of_logits(finish, parallel, **options)
        return lambda row, index, output: inner(row, index, output.float())

    with mock.patch.object(actor_module, "on_logprobs", on_copies):
        yield


def allocations(
    rank: int, hf: Path, layout: dict[str, int], samples: list[Sample], row: int, copies: bool
) -> dict[str, dict[str, int]]:
    """By pass: bytes of the largest single allocation, those of all that lived at once beyond what
    was there before, the largest fp32 tensor's elements, and the tokens of a row.
    """
    from megatron.core import parallel_state

    sections: dict[str, Any] = {"precision": {"dtype": "bf16"}, "train": {"row_tokens": row}}
    config = config_for(hf, algo={"minibatches": 1}, **sections)
    actor = make_actor(config, layout)
    try:
        plan = prepare(actor, config, samples)
        passes = {
            "train": lambda: actor.forward_backward(plan.steps[0]),
            "logprobs": lambda: actor.logprobs(plan),
        }
        found = {}
        for name, run in passes.items():
            with _fp32_logits() if copies else nullcontext():
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                    run()
                with _Largest() as largest:
                    run()
            found[name] = {
                **_memory(profiler),
                "fp32": largest.numel.get(torch.float32, 0),
                "row": len(plan.steps[0][0].tokens),
            }
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _memory(profiler: Any) -> dict[str, int]:
    """Allocations inside compiled operators count too: they are the allocator's own records."""
    events = profiler.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in events if e.name() == "[memory]"]
    alive = peak = 0
    for size in sizes:
        alive += size
        peak = max(peak, alive)
    return {"single": max(sizes), "peak": peak}
