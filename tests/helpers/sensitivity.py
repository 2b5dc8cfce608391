"""Whether settings of the algorithm have an effect: perturb each, and compare on a rich batch.

``without_effect(algo)`` names the settings that no change of ours brought to bear on the loss, its
gradients or the advantages. Where one setting openly takes the effect of another away (``idle``)
nothing is expected of that one.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from megarl.algos.control import Controllers
from megarl.algos.objective import Objective
from megarl.algos.segments import Segments
from megarl.algos.value import value_loss
from megarl.config.algo import AlgoSection
from megarl.config.schema import Config
from megarl.experience import complete_plan, make_plan
from megarl.mesh import Mesh
from megarl.types import LossInputs, PackedBatch, Sample, TrainPlan
from tests.helpers.rich import Numbers, rich_numbers, rich_samples, set_passes, trained

Results = dict[str, NDArray[np.float64]]
OUTSIDE = ("dynamic_sampling",)  # what is sampled, not what is computed from samples
ENTROPIES = (0.05, 0.15, 0.4, 1.5)  # mean of every step, nats: controllers see both sides


@dataclass(frozen=True)
class RichBatch:
    samples: list[Sample]
    steps: list[list[Numbers]]  # training steps, each with its numbers of every sample


def rich_batch(algo: AlgoSection, seed: int = 0) -> RichBatch:
    """One that ``algo`` can be evaluated on: with as many reward components as it weighs, and
    responses as long as what it punishes.
    """
    weights = getattr(algo.advantage, "weights", None)
    long: tuple[int, ...] = ()
    if algo.overlong is not None:
        start = algo.overlong.l_max - algo.overlong.l_cache
        long = tuple(start + max(1, int(algo.overlong.l_cache * share)) for share in (0.25, 0.6))
    return _batch(seed, len(weights) if weights else 2, long)


@cache
def _batch(seed: int, components: int, long: tuple[int, ...]) -> RichBatch:
    samples = rich_samples(seed=seed, components=components, long=long)
    steps = [rich_numbers(samples, seed=k, entropy=e) for k, e in enumerate(ENTROPIES)]
    return RichBatch(samples, steps)


def evaluate(algo: AlgoSection, batch: RichBatch | None = None) -> Results:
    """Everything a training run would compute from the batch, in the order of its samples: losses,
    gradients in log-probs, entropies and values, advantages, returns.
    """
    steps = list(_steps(algo, batch or rich_batch(algo)))
    return {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}


def _steps(algo: AlgoSection, batch: RichBatch) -> Iterator[Results]:
    config = _config(algo, batch)
    controllers, objective = Controllers.of(algo), Objective.of(algo)
    samples = batch.samples
    for numbers in batch.steps:
        plan = make_plan(samples, config, Mesh(), 0)
        for row in (row for rows in plan.steps for row in rows):
            set_passes(row, numbers, recompute=algo.old_logprobs == "recompute")
        complete_plan(plan, samples, config, controllers)
        yield _of_step(algo, objective, plan, numbers)


def perturbed(section: AlgoSection) -> Iterator[tuple[str, AlgoSection]]:
    """(dotted key, section with another value there), several for a key. What is off (null) and
    names of sections stay.
    """
    plain = section.model_dump()
    for path, annotation, value in _leaves(section, ()):
        for other in _others(annotation, value):
            try:
                changed = AlgoSection.model_validate(_with(plain, path, other))
            except ValidationError:
                continue
            if _acceptable(changed):
                yield ".".join(path), changed


def without_effect(
    algo: AlgoSection, batch: RichBatch | None = None, *, under: Collection[str] = ()
) -> list[str]:
    """Settings of which no change made a difference, in any bit of the results. ``under``: only
    those of these sections.
    """
    batch = batch or rich_batch(algo)
    base = list(_steps(algo, batch))
    silent: dict[str, bool] = {}
    for key, changed in perturbed(algo):
        if (not under or key.split(".")[0] in under) and not idle(algo, key):
            silent[key] = silent.get(key, True) and all(
                map(same, base, _steps(changed, batch))  # most differ in the first step
            )
    return [key for key, nothing in silent.items() if nothing]


def idle(algo: AlgoSection, key: str) -> bool:
    """Whether other settings of ``algo`` leave this one nothing to do."""
    correction, policy = algo.correction, algo.policy
    of_policy = {"sft": ("advantage", "old_logprobs"), "reinforce": ("old_logprobs",)}
    if key.split(".")[0] in of_policy.get(policy.name, ()):
        return True
    filters_only = correction is not None and correction.level is None
    drops = correction is not None and (correction.mode == "mask" or filters_only)
    return {
        "aggregation.denominator_mask": not drops,
        "correction.mode": filters_only,
        "kl.reference_every": True,  # whose log-probs these are is not of this step
        "kl.place": algo.advantage.name not in ("gae", "reinforce_pp"),
        "policy.w_min": getattr(policy, "w_eps_low", None) is not None,
        "policy.eps_entropic": getattr(policy, "entropy_quantile", None) is None,
        "advantage.ddof": getattr(algo.advantage, "scale", None) == "none",
        "advantage.eps": getattr(algo.advantage, "scale", None) == "none",
    }.get(key, False)


def _acceptable(algo: AlgoSection) -> bool:
    """What a run would not refuse: some settings need the trainer's own pass before the update, and
    CISPO's mask its bounds.
    """
    needs_pass = (
        algo.correction is not None
        or algo.policy.name == "kl_cov"
        or getattr(algo.policy, "entropy_quantile", None) is not None
        or (algo.entropy is not None and algo.entropy.name == "adaptive")
    )
    policy = algo.policy
    unbounded = getattr(policy, "ppo_mask", False) and None in (policy.eps_low, policy.eps_high)
    return not (needs_pass and algo.old_logprobs == "rollout") and not unbounded


def same(one: Results, two: Results) -> bool:
    return one.keys() == two.keys() and all(
        np.array_equal(one[k], two[k], equal_nan=True) for k in one
    )


def _config(algo: AlgoSection, batch: RichBatch) -> Config:
    mode = "sft" if algo.policy.name == "sft" else "train_only"
    longest = max(len(s.tokens) for s in batch.samples)
    return Config.model_validate(
        {
            "run": {"dir": "unused", "steps": 1, "mode": mode},
            "model": {"hf": "unused"},
            "optim": {"lr": 1.0},
            "algo": algo,
            "train": {"row_tokens": max(1024, longest)},
        }
    )


def _of_step(
    algo: AlgoSection, objective: Objective, plan: TrainPlan, numbers: list[Numbers]
) -> Results:
    """Of one training step; numbers of tokens by sample, whatever the packing."""
    losses, value_losses = [], []
    tokens: dict[int, dict[str, NDArray[np.float64]]] = {}
    for row in (row for rows in plan.steps for row in rows):
        inputs = _inputs(row, numbers)
        loss = objective(inputs, Segments(row.cu_seqlens), plan.coefficients).loss
        loss.backward()
        losses.append(float(loss.detach()))
        of_row = {
            "grad_logprobs": inputs.logprobs.grad,
            "grad_entropy": inputs.entropy.grad,
            "advantages": row.advantages,
            "returns": row.returns,
        }
        if algo.value is not None:
            value, of_row["grad_values"] = _value(algo, row, numbers)
            value_losses.append(value)
        for i, start, length in row.segments():
            tokens[i] = {
                name: values[start : start + length].double().numpy()
                for name, values in of_row.items()
                if values is not None
            }
    names = tokens[min(tokens)]
    found = {name: np.concatenate([tokens[i][name] for i in sorted(tokens)]) for name in names}
    return found | {"loss": np.array([sum(losses)]), "value_loss": np.array([sum(value_losses)])}


def _inputs(row: PackedBatch, numbers: list[Numbers]) -> LossInputs:
    old = row.rollout_logprobs if row.old_logprobs is None else row.old_logprobs
    return LossInputs(
        logprobs=trained(row, [n.logprobs for n in numbers]).requires_grad_(),
        entropy=trained(row, [n.entropy for n in numbers]).requires_grad_(),
        old_logprobs=old,
        **{
            f.name: getattr(row, f.name)
            for f in fields(LossInputs)
            if f.name not in ("logprobs", "entropy", "old_logprobs")
        },
    )


def _value(
    algo: AlgoSection, row: PackedBatch, numbers: list[Numbers]
) -> tuple[float, torch.Tensor | None]:
    """The critic's loss; values of the state before a target are those after the token before."""
    assert algo.value is not None and row.values is not None and row.returns is not None
    new = torch.zeros_like(row.values)
    for i, start, length in row.segments():
        new[start : start + length] = torch.from_numpy(numbers[i].new_values)
    new.requires_grad_()
    loss = value_loss(algo.value, new, row.values, row.returns, row.weight, row.mask).loss
    loss.backward()
    return float(loss.detach()), new.grad


# ---- other values of a setting


def _leaves(
    section: BaseModel, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if name == "name" or value is None or (*path, name)[0] in OUTSIDE:
            continue
        if isinstance(value, BaseModel):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), info.annotation, value


def _others(annotation: Any, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [x for x in _literals(annotation) if x not in (value, None)]
    if isinstance(value, int):
        return [x for x in (2 * value, value // 2, value + 1) if x != value]
    if isinstance(value, float):
        return [value * f for f in (2, 0.5, 0.9, 1e-3, 1e3)] if value else [0.05, 1.0]
    assert isinstance(value, tuple), (annotation, value)
    return [
        (*value[:k], other, *value[k + 1 :])
        for k, x in enumerate(value)
        for other in (*_others(None, float(x)), 1 + 2 * (x - 1), 1 + (x - 1) / 2)
    ]


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [x for part in get_args(annotation) for x in _literals(part)]


def _with(plain: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return plain | {first: _with(plain[first], tuple(rest), value) if rest else value}
