"""What workers do in ``test_replay*.py``: passes whose routing is replayed, looked at closely."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megarl.actor.actor import MegatronActor
from megarl.actor.load import load_hf_weights
from megarl.actor.names import unwrap
from megarl.actor.replay import RoutedPass, _moe_layers
from megarl.data.packing import local_index
from megarl.errors import MegarlError
from megarl.models.hf_io import open_checkpoint
from megarl.types import PackedBatch, Sample, StepMetrics
from tests.actor.work import by_sample, config_for, gradients, make_actor, plan_for
from tests.actor.work_families import _weighted_sum

Sections = dict[str, dict[str, Any]]


def evaluate(
    rank: int,
    models: dict[str, Path],
    layouts: dict[str, dict[str, int]],
    samples: dict[str, list[Sample]],
    sections: Sections,
    moved: dict[str, Path] | None = None,
) -> dict[str, dict[str, Any]]:
    """Of every model, with the settings ``sections``: the old log-probs and the gradients of a
    weighted sum of log-probs. ``moved``: weights that the model has for the gradients.
    """
    return {
        name: _evaluate(folder, layouts[name], samples[name], sections, (moved or {}).get(name))
        for name, folder in models.items()
    }


def _evaluate(
    folder: Path,
    layout: dict[str, int],
    samples: list[Sample],
    sections: Sections,
    moved: Path | None,
) -> dict[str, Any]:
    from megatron.core import parallel_state

    actor, rows = planned(folder, layout, samples, sections)
    try:
        found = {i: values for row in rows for i, values in by_sample(row, actor.parallel)}
        if moved is not None:
            chunks = [unwrap(chunk) for chunk in actor.model]
            load_hf_weights(chunks, open_checkpoint(moved), actor.spec, actor.parallel)
        metrics = backward(actor, rows)
        return {
            "logprobs": found,
            "gradients": gradients(actor),
            "metrics": metrics,
            "rows": len(rows),
        }
    finally:
        parallel_state.destroy_model_parallel()


def planned(
    folder: Path, layout: dict[str, int], samples: list[Sample], sections: Sections
) -> tuple[MegatronActor, list[PackedBatch]]:
    """An actor and its rows, whose old log-probs are there."""
    given: Sections = {"algo": {"minibatches": 1}, "train": {"row_tokens": 32}}
    config = config_for(folder, **{**given, **sections})
    actor = make_actor(config, layout)
    plan = plan_for(actor, config, samples)
    actor.logprobs(plan)
    return actor, plan.steps[0]


def backward(actor: MegatronActor, rows: list[PackedBatch]) -> StepMetrics:
    """Gradients of the weighted sum, ready."""
    loss = actor._of_logprobs(_weighted_sum(actor, len(rows)))
    metrics, _ = actor.gradients(rows, loss, training_pass(actor, rows))
    return metrics


def training_pass(actor: MegatronActor, rows: list[PackedBatch]) -> RoutedPass | None:
    return actor.replay.training_pass(actor.model, rows) if actor.replay else None


def permuted(rank: int, hf: Path, samples: list[Sample], sections: Sections) -> dict[str, float]:
    """How far gradients move, as a share of a tensor's largest entry, when the routing of all rows
    is moved by one layer, by one token of its sample, or to the next microbatch.
    """
    from megatron.core import parallel_state

    actor, rows = planned(hf, {}, samples, sections)
    try:
        backward(actor, rows)
        right = gradients(actor)
        given = [row.routing for row in rows]
        found = {}
        for how in (by_layer, by_token, by_microbatch):
            for row, routing in zip(rows, how(rows), strict=True):
                row.routing = routing
            backward(actor, rows)
            wrong = gradients(actor)
            moved = [float((wrong[n] - g).abs().max() / g.abs().max()) for n, g in right.items()]
            found[how.__name__] = max(moved)
            for row, routing in zip(rows, given, strict=True):
                row.routing = routing
        backward(actor, rows)
        again = gradients(actor)
        assert all(torch.equal(again[n], g) for n, g in right.items())
        return found
    finally:
        parallel_state.destroy_model_parallel()


def by_layer(rows: list[PackedBatch]) -> list[torch.Tensor]:
    return [routing_of(row).roll(1, dims=1) for row in rows]


def by_token(rows: list[PackedBatch]) -> list[torch.Tensor]:
    found = []
    for row in rows:
        routing = routing_of(row).clone()
        for _, start, n in row.segments():
            routing[start : start + n - 1] = routing[start : start + n - 1].roll(1, dims=0)
        found.append(routing)
    return found


def by_microbatch(rows: list[PackedBatch]) -> list[torch.Tensor]:
    """As far as both rows have routing at a position."""
    found = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        assert row.routed is not None and other.routed is not None
        both = (row.routed & other.routed)[:, None, None]
        found.append(torch.where(both, routing_of(other), routing_of(row)))
    return found


def routing_of(row: PackedBatch) -> torch.Tensor:
    assert row.routing is not None
    return row.routing


def seen_by_routers(
    rank: int, hf: Path, layout: dict[str, int], samples: list[Sample], sections: Sections
) -> list[tuple[int, str, int, list[tuple[int, int, list[int]]]]]:
    """What routers of this rank chose in training, in their order: (layer of the model, "forward"
    or "recompute", microbatch by order, [(sample, its token, experts in order)]), where a sample's
    routing is known.
    """
    from megatron.core import parallel_state

    actor, rows = planned(hf, layout, samples, sections)
    try:
        places = [_places(actor, row) for row in rows]
        calls: dict[tuple[int, str], int] = {}
        found = []

        def watch(layer: int) -> Any:
            def hook(module: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
                again = bool(sections.get("recompute")) and torch.is_grad_enabled()
                key = layer, "recompute" if again else "forward"
                number = calls[key] = calls.get(key, -1) + 1
                chosen = [ids.nonzero()[:, 0].tolist() for ids in output[1]]
                local = zip(places[number], chosen, strict=True)
                found.append((*key, number, [(*at, ids) for at, ids in local if at is not None]))

            return hook

        for chunk in actor.model:
            for layer in _moe_layers(chunk):
                layer.router.register_forward_hook(watch(layer.layer_number - 1))
        backward(actor, rows)
        assert all(n == len(rows) - 1 for n in calls.values())
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _places(actor: MegatronActor, row: PackedBatch) -> list[tuple[int, int] | None]:
    """(sample, token) of every token that routers see here, None where it is the last or none."""
    everywhere: list[tuple[int, int] | None] = [None] * len(row.tokens)
    for i, start, n in row.segments():
        everywhere[start : start + n - 1] = [(i, t) for t in range(n - 1)]
    mesh, at = actor.parallel.mesh, actor.parallel.at
    index = local_index(tuple(row.cu_seqlens.tolist()), mesh.cp, at.cp)
    share = len(index) // mesh.tp
    return [everywhere[p] for p in index[at.tp * share : (at.tp + 1) * share]]


def misused(rank: int, hf: Path, samples: list[Sample]) -> dict[str, str]:
    """What is said where choices are not taken as they must be."""
    from megatron.core import parallel_state

    actor, rows = planned(hf, {}, samples, {"moe": {"routing_replay": "rollout"}})
    routers = [layer.router for layer in _moe_layers(actor.model[0])]
    index = torch.arange(len(rows[0].tokens))
    hidden = torch.randn(len(index), 1, actor.spec.hidden, requires_grad=True)

    def of(*layers: int) -> torch.Tensor:
        parts = [routers[j](hidden) for j in layers]
        return torch.stack([weights for weights, _ in parts]).sum()

    def checkpointed() -> torch.Tensor:
        return checkpoint(lambda x: of(*range(len(routers))) + x.sum(), hidden, use_reentrant=True)

    def run(*computes: Callable[[], torch.Tensor], number: int = 2, backwards: int = 0) -> None:
        with training_pass(actor, rows) as routing:
            for compute in computes:
                output = routing.forward(actor.model[0], number, index, compute)
                for _ in range(backwards):
                    output.backward(retain_graph=True)

    every = range(len(routers))
    cases: dict[str, Callable[[], Any]] = {
        "a layer is left out": lambda: run(lambda: of(*every[:-1])),
        "a layer twice": lambda: run(lambda: of(*every, 1)),
        "a microbatch again": lambda: run(checkpointed, checkpointed),
        "no backward pass": lambda: run(checkpointed, number=3),
        "recomputed twice": lambda: run(checkpointed, backwards=2),
        "as it must be": lambda: run(checkpointed, backwards=1),
        "nothing to recompute": lambda: run(lambda: of(*every)),
        "outside": lambda: _outside(training_pass(actor, rows), of),
    }
    try:
        return {name: _refusal(case) for name, case in cases.items()}
    finally:
        parallel_state.destroy_model_parallel()


def _outside(routing: RoutedPass | None, of: Callable[..., torch.Tensor]) -> None:
    assert routing is not None
    with routing:
        of(0)


def doctored(rank: int, hf: Path, samples: list[Sample]) -> dict[str, str]:
    """What is said of a row whose routing is no choice of the model's routers."""
    from megatron.core import parallel_state

    actor, rows = planned(hf, {}, samples, {"moe": {"routing_replay": "rollout"}})
    routing, row = routing_of(rows[1]), rows[1]
    first = int(row.routed.nonzero()[1])  # type: ignore[union-attr]

    def at(layer: int, k: int, value: int) -> torch.Tensor:
        changed = routing.clone()
        changed[first, layer, k] = value
        return changed

    wrong = {
        "none": None,
        "a token less": routing[:-1],
        "a layer less": routing[:, :-1],
        "a layer more": torch.cat([routing, routing[:, :1]], 1),
        "an expert less": routing[..., :-1],
        "too large": at(2, 1, actor.spec.experts),
        "twice": at(0, 1, int(routing[first, 0, 0])),
    }
    found = {"position": str(first), "length": str(len(row.tokens))}
    try:
        for name, ids in wrong.items():
            row.routing = ids
            found[name] = _refusal(lambda: backward(actor, rows))
        return found
    finally:
        parallel_state.destroy_model_parallel()


def with_a_reference(rank: int, hf: Path, samples: list[Sample]) -> dict[str, dict[int, Any]]:
    """Old and reference log-probs of a policy that is its own reference."""
    from megatron.core import parallel_state

    sections: Sections = {
        "moe": {"routing_replay": "rollout"},
        "algo": {"minibatches": 1, "kl": {"coef": 0.1}},
        "train": {"row_tokens": 32},
    }
    config = config_for(hf, **sections)
    actor = make_actor(config, {})
    try:
        actor.keep_reference()
        plan = plan_for(actor, config, samples)
        actor.logprobs(plan)
        rows = plan.steps[0]
        old = {i: values for row in rows for i, values in by_sample(row, actor.parallel)}
        for row in rows:
            row.old_logprobs = row.ref_logprobs
        reference = {i: values for row in rows for i, values in by_sample(row, actor.parallel)}
        return {"old": old, "reference": reference}
    finally:
        parallel_state.destroy_model_parallel()


def _refusal(case: Callable[[], Any]) -> str:
    try:
        case()
    except MegarlError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"
