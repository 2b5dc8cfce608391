"""A step's samples -> optimizer steps -> rows of every rank, from facts; then this rank's rows.

1. ``algo.minibatches`` optimizer steps, a prompt's samples in one of them.
2. The rows of an optimizer step, of all data-parallel ranks (``data/packing.py``). Every rank finds
   the same plan, so nobody has to be told it.
3. Rows, once their tokens are here (``data/exchange.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.config.algo import AlgoSection
from megarl.config.schema import Config
from megarl.data.exchange import Collected, Delivery, Exchange
from megarl.data.nodes import Nodes
from megarl.data.packing import Payload, Tokens, brought, build_row, plan_rows, routing_shape
from megarl.errors import DataError
from megarl.mesh import Mesh
from megarl.models.flops import pass_flops
from megarl.models.spec import ModelSpec
from megarl.types import Known, Sample, SampleFacts, TrainPlan


@dataclass(frozen=True)
class StepRows:
    """Of one optimizer step: ``rows[dp rank][microbatch]``, samples by their index in the training
    step, and ``lengths[microbatch]``.
    """

    rows: list[list[list[int]]]
    lengths: list[int]
    trained_tokens: int


def plan_step(
    samples: Sequence[Collected],
    config: Config,
    mesh: Mesh,
    spec: ModelSpec,
    nodes: Nodes,
    step: int = 0,
    *,
    replays: bool = True,
) -> tuple[TrainPlan, Delivery]:
    """This rank's rows for a model ``spec`` in the layout ``mesh``, and what was moved for them
    (figures alone).
    ``step``: the training step. ``replays``: the model takes the rollout's choices of experts where
    ``moe.routing_replay`` says so, as the policy does and a critic does not; routing is moved for
    nothing else. Collective over all trainer ranks.
    """
    facts, at = [s.facts for s in samples], mesh.coordinates(nodes.rank)
    steps = plan_steps(facts, config, mesh, pass_flops(spec))
    routing, layers = None, [list[int]() for _ in range(mesh.pp)]
    if replays and config.moe.routing_replay == "rollout":
        layers = stage_layers(spec.moe_layers, mesh)
        routing = routing_here(facts, layers, at.pp, spec.topk)
    moved = Exchange(mesh, nodes, layers).deliver(samples, dp_ranks(steps, len(facts)))
    plan = build_plan(steps, facts, moved.payloads, config, mesh, at.dp, routing, step)
    return plan, replace(moved, payloads={})  # rows have all of it: a step holds it once


def plan_steps(
    samples: Sequence[Known], config: Config, mesh: Mesh, flops: tuple[int, int] = (1, 0)
) -> list[StepRows]:
    """``flops``: the model's, of a token and of a pair of tokens (``models/flops.py``)."""
    _check_steps(samples)
    if needs_recorded_values(config) and any("values" not in s.brings for s in samples):
        accepted = "critic.lr, or values of every sample: algo.advantage.name=gae needs them"
        raise DataError(f"{config.data.recorded}: samples without values; accepted: {accepted}")
    trained = trained_samples(samples, config.algo)
    steps = []
    for part in split_by_group(samples, config.algo.minibatches):
        plan = plan_rows(
            [samples[i].length for i in part],
            row_tokens=config.train.row_tokens,
            dp=mesh.dp,
            segment_multiple=mesh.segment_multiple,
            row_multiple=mesh.row_multiple,
            rows_multiple=mesh.rows_multiple,
            buckets=config.train.row_buckets,
            flops=flops,
        )
        rows = [[[part[k] for k in row] for row in rank] for rank in plan.rows]
        steps.append(StepRows(rows, plan.lengths, sum(trained[i].trained_tokens for i in part)))
    return steps


def dp_ranks(steps: Sequence[StepRows], count: int) -> list[int]:
    """Which data-parallel rank trains each of ``count`` samples."""
    found = [-1] * count
    for step in steps:
        for dp_rank, rows in enumerate(step.rows):
            for i in (i for row in rows for i in row):
                found[i] = dp_rank
    return found


def build_plan(
    steps: Sequence[StepRows],
    samples: Sequence[Known],
    payloads: Tokens,
    config: Config,
    mesh: Mesh,
    dp_rank: int,
    routing: tuple[int, int, str] | None = None,
    step: int = 0,
) -> TrainPlan:
    """The rows of data-parallel rank ``dp_rank``, whose samples' tokens are ``payloads``. Without
    advantages and weights yet. ``routing``: layers of this stage, experts a token and dtype.
    ``step``: the training step.
    """
    brings = brought(samples)
    kept = _with_data_masks(payloads, samples, config.algo)
    plan = TrainPlan(
        [
            [
                build_row(
                    kept,
                    row,
                    length=length,
                    segment_multiple=mesh.segment_multiple,
                    brings=brings,
                    routing=routing,
                )
                for row, length in zip(step.rows[dp_rank], step.lengths, strict=True)
            ]
            for step in steps
        ],
        [step.trained_tokens for step in steps],
        [s.name for s in samples],
        step=step,
    )
    if config.algo.old_logprobs == "rollout":
        for row in (row for rows in plan.steps for row in rows):
            row.old_logprobs = row.rollout_logprobs
    return plan


def trained_samples(samples: Sequence[Known], algo: AlgoSection) -> list[Known]:
    """The samples with their data masks: ``algo.overlong_filter`` takes truncated ones out of the
    training. Rewards and lengths that enter statistics are those of the samples as they came.
    """
    return [s.untrained() if algo.overlong_filter and s.truncated else s for s in samples]


def needs_recorded_values(config: Config) -> bool:
    """Whether the samples must bring values, as no critic gives them."""
    return config.algo.needs_values and config.critic.lr is None


def split_by_group(samples: Sequence[Known], parts: int) -> list[list[int]]:
    """Sample indices of each optimizer step: whole groups, dealt in order of first appearance."""
    groups = list(dict.fromkeys(s.group for s in samples))
    share = {g: k * parts // len(groups) for k, g in enumerate(groups)}
    out: list[list[int]] = [[] for _ in range(parts)]
    for i, sample in enumerate(samples):
        out[share[sample.group]].append(i)
    return out


def stage_layers(moe_layers: Sequence[bool], mesh: Mesh) -> list[list[int]]:
    """Which MoE layers, counted from 0 without the dense ones, each pipeline stage has.
    ``moe_layers``: of every layer, whether it is one.
    """
    number = np.cumsum(moe_layers) - 1
    return [
        [
            int(number[layer])
            for chunk in range(mesh.vpp)
            for layer in mesh.layers_of(len(moe_layers), stage, chunk)
            if moe_layers[layer]
        ]
        for stage in range(mesh.pp)
    ]


def routing_here(
    samples: Sequence[SampleFacts], layers: Sequence[Sequence[int]], stage: int, topk: int
) -> tuple[int, int, str] | None:
    """What ``build_plan`` takes of the samples' routing; None where ``stage``, of those that
    ``layers`` describes (``stage_layers``), has no layer for it. Raises DataError where there is
    none, or one of another model than with ``topk`` experts a token.
    """
    shape, count = routing_shape(samples), sum(map(len, layers))
    if shape is None:
        raise DataError(
            f"sample {samples[0].name} has no routing; accepted: that of {count} MoE layers, which "
            "moe.routing_replay=rollout replays"
        )
    for found, accepted, what in (
        (shape[0], count, "MoE layers"),
        (shape[1], topk, "experts a token"),
    ):
        if found != accepted:
            raise DataError(
                f"sample {samples[0].name} has the routing of {found} {what}; accepted: "
                f"{accepted}, as many as the model has"
            )
    return (len(layers[stage]), *shape[1:]) if layers[stage] else None


def _with_data_masks(
    payloads: Tokens, samples: Sequence[Known], algo: AlgoSection
) -> dict[int, Payload | Sample]:
    here = range(len(samples)) if isinstance(payloads, Sequence) else payloads
    found: dict[int, Payload | Sample] = {}
    for i in here:
        payload: Payload | Sample = payloads[i]
        if algo.overlong_filter and samples[i].truncated:
            payload = replace(payload, mask=np.zeros(payload.length, bool))
        found[i] = payload
    return found


def _check_steps(samples: Sequence[Known]) -> None:
    """Raise DataError, on every rank alike, for steps that end outside their sample."""
    for s in samples:
        ends = () if s.step_ends is None else s.step_ends.tolist()
        if any(not 1 <= end < s.length for end in ends):
            raise DataError(
                f"sample {s.name} of {s.length} tokens has steps that end at the tokens "
                f"{ends}; accepted: 1 to {s.length - 1}"
            )
