"""Kind sharded: data-parallel rows and microbatches, each cut over context-parallel ranks.

Rows are packed and cut as in training, the weights come from counts over all of them, and a row's
loss is evaluated by as many processes as it is cut into, with their one all-reduce.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.algos.segments import Segments
from megarl.conformance import sections
from megarl.conformance.cases import Given, Inputs, Unsupported
from megarl.conformance.loss_kinds import Step, differentiable, gradient
from megarl.conformance.ranks import Ranks
from megarl.conformance.rows import DTYPES, Packed, Sequences
from megarl.conformance.sections import check_keys
from megarl.data.packing import local_index
from megarl.types import LossInputs

Computed = Mapping[str, Any]


def sharded(given: Given, dtype: torch.dtype, ranks: Ranks) -> Computed:
    cp, assignment = _layout(given)
    step = _step(given, dtype)  # what is wrong with the case is found here, not in every rank
    job = {
        "config": dict(given.config),
        "batch": dict(given.inputs["batch"]),
        "assignment": assignment,
        "dtype": str(dtype).removeprefix("torch."),
    }
    found = ranks.run(cp, job)
    places = [(d, m) for d, part in enumerate(assignment) for m in range(len(part))]
    shards, grad = [], [[0.0] * len(part) for part in step.sequences.mask]
    for k, (dp_rank, microbatch) in enumerate(places):
        for cp_rank in range(cp):
            shard = found[cp_rank][k]
            for i, t, value in shard.pop("grad"):
                grad[i][t] = value
            shards.append(
                {"dp_rank": dp_rank, "microbatch": microbatch, "cp_rank": cp_rank, **shard}
            )
    owner: list[list[int | None]] = [[None] * len(part) for part in step.sequences.mask]
    for shard in shards:
        for i, tokens in shard["tokens"]:
            for t in tokens:
                owner[i][t] = shard["cp_rank"]
    counts = list(step.sequences.trained.values())
    return {
        "global_token_count": sum(counts),
        "global_seq_count_all": len(counts),
        "global_seq_count_nonempty": sum(n > 0 for n in counts),
        "cp_owner": owner,
        "shards": shards,
        "loss": math.fsum(s["local_loss_numerator_over_global_denominator"] for s in shards),
        "grad_logp": grad,
        "grad_norm": math.sqrt(math.fsum(g * g for part in grad for g in part)),
    }


def work(job: Mapping[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """A rank's share of every row, in the order of the assignment."""
    inputs = Inputs({"batch": job["batch"], "assignment": job["assignment"]})
    step = _step(Given("", "sharded", job["config"], inputs), DTYPES[job["dtype"]])
    return [_share(step, k, group) for k in range(len(step.rows))]


def _layout(given: Given) -> tuple[int, Sequence[Sequence[Sequence[int]]]]:
    """(context-parallel ranks, ``assignment[dp rank][microbatch]``: sequences)."""
    config, assignment = given.config, given.inputs["assignment"]
    check_keys(config, ("loss", "dp", "cp", "num_microbatches"))
    cp = config.get("cp", 1)
    if not isinstance(cp, int) or cp < 1:
        raise Unsupported(f"config.cp is {cp!r}, not a number of ranks")
    if config.get("dp", len(assignment)) != len(assignment):
        raise Unsupported(f"config.dp is {config['dp']}, inputs.assignment has {len(assignment)}")
    return cp, assignment


def _step(given: Given, dtype: torch.dtype) -> Step:
    cp, assignment = _layout(given)
    algo = sections.algo(given.config.get("loss") or {})
    sequences = Sequences(Inputs(given.inputs["batch"]), dtype)
    # All rows have one length, and every sequence is padded to what 2 * cp chunks need.
    multiple, rows = 2 * cp, [row for part in assignment for row in part]
    length = max([multiple, *(sequences.length(row, multiple) for row in rows)])
    packed = [sequences.pack(row, multiple=multiple, length=length) for row in rows]
    return Step(algo, sequences, packed)


def _share(step: Step, k: int, group: dist.ProcessGroup) -> dict[str, Any]:
    packed, cp, rank = step.rows[k], group.size(), group.rank()
    bounds = packed.row.cu_seqlens
    index = local_index(tuple(bounds.tolist()), cp, rank)
    x = differentiable(_cut(step.inputs(k), index))
    segments = Segments(bounds // cp, group)
    loss = step.objective(x, segments, step.coefficients).loss
    loss.backward()
    log_ratio = torch.where(x.mask, x.logprobs.detach() - x.old_logprobs, 0.0)
    (sums,) = Segments(bounds // cp).sums(log_ratio)
    held = _tokens(packed, index)
    grad = gradient(x.logprobs).tolist()
    return {
        "tokens": [[i, sorted(held[i])] for i in packed.row.samples],
        "local_loss_numerator_over_global_denominator": float(loss.detach()),
        "local_token_count": int(x.mask.sum()),
        "local_seq_logratio_sum": {str(i): float(sums[k]) for k, i in enumerate(packed.where)},
        "grad": [[i, t, grad[at]] for i, part in held.items() for t, at in part.items()],
    }


def _cut(inputs: LossInputs, index: torch.Tensor) -> LossInputs:
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return replace(inputs, **{name: v[index] for name, v in values.items() if v is not None})


def _tokens(packed: Packed, index: torch.Tensor) -> dict[int, dict[int, int]]:
    """Of every sample the response tokens a rank holds -> where in its part of the row."""
    at = {position: k for k, position in enumerate(index.tolist())}
    return {
        i: {p - place.start: at[p] for p in range(place.start, place.stop) if p in at}
        for i, place in packed.where.items()
    }
