"""The bits that every compiled op returns for fixed inputs, as JSON {name of the call: digests}.

Run as a program, in a process for each library (MEGARL_LIBRARY). The calls are those that the
self-checks make, so a new op is among them once it has one, repeated in float64 where an op takes
it; and the policy loss in all its variants.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from megarl.ops._selfcheck import checked_ops, run_check
from megarl.ops.policy_loss import (
    KL_TYPES,
    KL_WEIGHTS,
    OBJECTIVES,
    OPSM,
    PolicyRow,
    policy_loss,
    policy_sums,
    sample_row,
)
from tests.helpers.op_calls import OpRecorder, digests

CPU = torch.device("cpu")
Call = tuple[str, list[str]]


def calls_of_checks() -> Iterator[Call]:
    for op in checked_ops():
        with OpRecorder() as recorder:
            run_check(op, CPU)
        for i, call in enumerate(recorder.calls):
            yield f"{op} {i}: {call.op}", call.digests
            wide = [_wide(x) for x in call.arguments]
            if all(one is two for one, two in zip(wide, call.arguments, strict=True)):
                continue
            function = getattr(torch.ops.megarl, call.op)
            try:
                yield f"{op} {i}: {call.op} float64", digests(function(*wide), wide)
            except RuntimeError as e:  # an op for other types
                assert "must be" in str(e), e


def calls_of_policy_loss() -> Iterator[Call]:
    """Sizes that no number of lanes divides; every objective with every kind of KL."""
    variants = product(OBJECTIVES, KL_TYPES, KL_WEIGHTS, OPSM, (False, True))
    for k, (objective, kl_type, kl_weight, opsm, all_metrics) in enumerate(variants):
        row, terms = sample_row(objective, num_tokens=1300 + k % 37, seed=k)
        terms = replace(
            terms, kl_type=kl_type, kl_weight=kl_weight, opsm=opsm, all_metrics=all_metrics
        )
        for dtype in (torch.float32, torch.float64):
            typed = _typed(row, dtype)
            name = f"{objective} {kl_type} {kl_weight} {opsm} {all_metrics} {dtype}"
            sums = policy_sums(typed, terms)
            results = (*policy_loss(typed, terms), *policy_loss(typed, terms, sums), sums)
            yield f"policy_loss {name}", digests(results)


def _wide(x: object) -> object:
    is_single = isinstance(x, Tensor) and x.dtype == torch.float32
    return x.double() if is_single else x


def _typed(row: PolicyRow, dtype: torch.dtype) -> PolicyRow:
    def typed(x: Tensor | None) -> Tensor | None:
        return x.to(dtype) if x is not None and x.is_floating_point() else x

    return PolicyRow(**{name: typed(x) for name, x in vars(row).items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump(dict([*calls_of_checks(), *calls_of_policy_loss()]), sys.stdout)
