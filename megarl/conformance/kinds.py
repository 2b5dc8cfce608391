"""The name table of kinds, and what running a file's cases does with what goes wrong."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megarl.conformance import advantage_kinds, loss_kinds
from megarl.conformance.cases import Case, Dtype, Given, Result, Unsupported, verdict
from megarl.conformance.long_sums import long_accum
from megarl.conformance.ranks import Ranks
from megarl.conformance.rows import DTYPES
from megarl.conformance.sharded import sharded

Compute = Callable[[Given, torch.dtype, Ranks], Mapping[str, Any]]


def _here(compute: Callable[[Given, torch.dtype], Mapping[str, Any]]) -> Compute:
    """A kind that needs no other process."""
    return lambda given, dtype, ranks: compute(given, dtype)


KINDS: dict[str, Compute] = {
    "seq_advantage": _here(advantage_kinds.seq_advantage),
    "process_advantage": _here(advantage_kinds.process_advantage),
    "gdpo": _here(advantage_kinds.gdpo),
    "reinforce_pp": _here(advantage_kinds.reinforce_pp),
    "reinforce_pp_baseline": _here(advantage_kinds.reinforce_pp_baseline),
    "whiten_shards": _here(advantage_kinds.whiten_shards),
    "kl": _here(loss_kinds.kl),
    "elementwise": _here(loss_kinds.elementwise),
    "loss": _here(loss_kinds.loss),
    "rollout_correction": _here(loss_kinds.rollout_correction),
    "mismatch_metrics": _here(loss_kinds.mismatch),
    "gae": _here(advantage_kinds.generalised),
    "value_loss": _here(loss_kinds.value_loss),
    "overlong": _here(advantage_kinds.overlong),
    "dynamic_sampling": _here(advantage_kinds.dynamic_sampling),
    "logits": _here(loss_kinds.logits),
    "adaptive_entropy": _here(advantage_kinds.adaptive_entropy),
    "sharded": sharded,
    "kl_cov": _here(loss_kinds.kl_cov),
    "long_accum": _here(long_accum),
}


def run_cases(cases: Sequence[Case], dtype: Dtype) -> Iterator[Result]:
    """One result a case, in order. A case that cannot be computed spoils no other."""
    with Ranks("megarl.conformance.sharded:work") as ranks:
        for case in cases:
            yield _run(case, dtype, ranks)


def _run(case: Case, dtype: Dtype, ranks: Ranks) -> Result:
    given = case.given
    try:
        if given.kind not in KINDS:
            raise Unsupported(f"kind {given.kind!r} is unknown; known: {', '.join(KINDS)}")
        computed = KINDS[given.kind](given, DTYPES[dtype], ranks)
    except Unsupported as e:
        return Result(given.id, given.kind, {}, "unsupported", str(e))
    except Exception as e:
        at = traceback.extract_tb(e.__traceback__)[-1]
        reason = f"{type(e).__name__}: {e} (at {at.filename}:{at.lineno})"
        return Result(given.id, given.kind, {}, "fail", reason)
    return verdict(case, computed, dtype)
