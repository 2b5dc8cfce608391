"""How far a server's log-prob of a token may be from the actor's, on the same weights."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.helpers.dist import WorkerPool
from tests.truth.served import Question


class Tolerance(NamedTuple):
    """Of abs(actor's - server's) natural log-prob of sampled tokens, at temperatures 1 and 0.7,
    with the actor and the server at TP 1 and 2. ``seen``: the most that was measured, over 288
    tokens a case, of the embedded server and of SGLang 0.5.23.
    """

    largest: float
    mean: float
    seen: str
    why: str


TOLERANCES = {
    "fp32": Tolerance(
        2e-5,
        3e-6,
        "largest 5.5e-6 and 5.7e-6, mean 5.4e-7 and 1.0e-6",
        "sums in another order; logits, and so their errors, are divided by the temperature",
    ),
    "bf16 dense": Tolerance(
        0.2,
        0.03,
        "largest 0.089 and 0.052, mean 0.015 and 0.011",
        "activations are rounded to 8 bits after every operation, in other places",
    ),
    "bf16 routed": Tolerance(
        3.0,
        0.06,
        "largest 0.58 and 0.70, mean 0.023 and 0.022",
        "besides, where two experts' scores are nearly equal the token goes to another expert",
    ),
    "bf16 routed, replayed": Tolerance(
        0.25,
        0.03,
        "largest 0.12 and 0.050, mean 0.015 and 0.010",
        "the choice of experts is the server's: rounding alone is left, as in a dense model",
    ),
}


def kind_of(question: Question) -> str:
    """Its row of the table."""
    if question.dtype == "fp32":
        return "fp32"
    if question.samples[0].routing is None:
        return "bf16 dense"
    return "bf16 routed, replayed" if question.replay else "bf16 routed"


def differences(pool: WorkerPool, questions: Sequence[Question], tp: int) -> list[Any]:
    """Of every question: f64 [sampled tokens], the actor's log-probs less the server's."""
    ranks = pool.run(
        "tests.truth.work:logprobs", world=tp, questions=list(questions), layout={"tp": tp}
    )
    found = []
    for question, *parts in zip(questions, *ranks, strict=True):
        own = {i: values for part in parts for i, values in part.items()}
        assert len(own) == len(question.samples)
        found.append(
            np.concatenate(
                [
                    (own[i].double().numpy() - s.rollout_logprobs[1:])[s.mask[1:]]
                    for i, s in enumerate(question.samples)
                ]
            )
        )
    return found


def check(found: Any, kind: str) -> None:
    tolerance = TOLERANCES[kind]
    largest, mean = np.abs(found).max(), np.abs(found).mean()
    print(f"{kind}: largest {largest:.2g}, mean {mean:.2g} of {len(found)} tokens")
    assert largest < tolerance.largest, (kind, largest, tolerance)
    assert mean < tolerance.mean, (kind, mean, tolerance)
