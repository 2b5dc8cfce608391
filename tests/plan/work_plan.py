"""Worker side of test_plan_ranks.py: what a real model occupies on each rank."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megarl.actor.actor import MegatronActor
from megarl.actor.names import unwrap
from megarl.types import Sample
from tests.actor.work import config_for, make_actor, prepare

ROW_TOKENS = 96


def occupied(
    rank: int,
    hf: Path,
    layout: dict[str, int],
    samples: list[Sample],
    dtype: str,
    distributed: bool,
    recompute: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Numbers and bytes of this rank after one optimizer step."""
    from megatron.core import parallel_state

    config = config_for(
        hf,
        precision={"dtype": dtype},
        algo={"minibatches": 1},
        train={"row_tokens": ROW_TOKENS},
        optim={"lr": 1e-3, "distributed": distributed},
    )
    actor = make_actor(config, layout)
    for name, value in (recompute or {}).items():
        for chunk in actor.model:
            setattr(unwrap(chunk).config, name, value)
    try:
        rows = prepare(actor, config, samples).steps[0]
        saved = _Saved(actor)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            actor.forward_backward(rows)
        actor.update()
        return {
            **_sizes(actor),
            "rows": len(rows),
            "row_tokens": len(rows[0].tokens),
            # the mean length of a token's own sequence, of the row where it is greatest
            "sequence": max(
                round(sum(n * n for _, _, n in row.segments()) / len(row.tokens)) for row in rows
            ),
            "saved": saved.most,
            "sent": sum(t.nbytes for _, t in actor.weights().tensors()),
            "at": vars(actor.parallel.at),
        }
    finally:
        parallel_state.destroy_model_parallel()


def _sizes(actor: MegatronActor) -> dict[str, Any]:
    parameters = [p for chunk in actor.model for p in chunk.parameters()]
    experts = [p for c in actor.model for n, p in c.named_parameters() if ".experts." in n]
    shared = [b for chunk in actor.model for b in chunk.buffers]
    grouped = [b for chunk in actor.model for b in chunk.expert_parallel_buffers]
    return {
        "expert": sum(p.numel() for p in experts),
        "shared": sum(p.numel() for p in parameters) - sum(p.numel() for p in experts),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "bias_bytes": sum(
            b.nbytes for c in actor.model for n, b in c.named_buffers() if "expert_bias" in n
        ),
        "tensors": len(parameters),
        "gradient_bytes": sum(b.grad_data.nbytes for b in (*shared, *grouped)),
        "buffers": len(shared) + len(grouped),
        "optimizer_bytes": _optimizer_bytes(actor.optimizer, parameters),
    }


def _optimizer_bytes(optimizer: Any, parameters: list[torch.Tensor]) -> int:
    """Moments, and main parameters that are not the model's own."""
    model = {p.untyped_storage().data_ptr() for p in parameters}
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for p in [p for group in part.optimizer.param_groups for p in group["params"]]:
            own = p.untyped_storage().data_ptr() not in model
            state = part.optimizer.state[p]
            total += p.nbytes * own + state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    return total


class _Saved:
    """Bytes of the storages that autograd graphs hold at a time, the parameters' left out."""

    def __init__(self, actor: MegatronActor) -> None:
        self.most = 0
        self._now = 0
        self._holders: Counter[int] = Counter()
        self._own = {
            t.untyped_storage().data_ptr()
            for chunk in actor.model
            for t in (*chunk.parameters(), *(b.grad_data for b in chunk.buffers))
        }

    def pack(self, tensor: torch.Tensor) -> "_Kept":
        return _Kept(self, tensor)

    @staticmethod
    def unpack(kept: "_Kept") -> torch.Tensor:
        return kept.tensor

    def hold(self, tensor: torch.Tensor, holders: int) -> None:
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where in self._own:
            return
        before = self._holders[where]
        self._holders[where] += holders
        if 0 in (before, self._holders[where]):
            self._now += holders * storage.nbytes()
            self.most = max(self.most, self._now)


class _Kept:
    """A saved tensor, until the graph drops it."""

    def __init__(self, saved: _Saved, tensor: torch.Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        saved.hold(tensor, 1)

    def __del__(self) -> None:
        self.saved.hold(self.tensor, -1)
