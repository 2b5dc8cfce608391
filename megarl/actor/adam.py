"""What the implementations of Adam keep between steps, and how a file has it.

Moments are the same tensors in all of them (``exp_avg``, ``exp_avg_sq``, one value an element), and
upstream's checkpoints hold them as fp32 whatever an optimizer keeps them in. Steps are not: torch
counts them by parameter, as an fp32 tensor in its state; the fused ones of Transformer Engine and
apex by group, as an int that goes into a kernel. So a file has the number once, beside the
optimizer's state (``state.py``), and every kind takes it from there: what one wrote another reads.
"""

from typing import Any

import torch
from megatron.core import optimizer as upstream

_TORCH = (torch.optim.AdamW, torch.optim.Adam)


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Those that update parameters, inside Megatron's."""
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def counts_by_parameter(one: Any) -> bool:
    return isinstance(one, _TORCH)


def counts_by_group(one: Any) -> bool:
    """Upstream's Adam is Transformer Engine's or apex's, where there is one."""
    return isinstance(one, upstream.Adam) and not counts_by_parameter(one)


def create_moments(optimizer: Any) -> None:
    """Moments and step counters of an optimizer that has not stepped yet: upstream's loading
    expects them, also in the file, and does not create them in every kind and layout.
    """
    for one in inner_optimizers(optimizer):
        for group in one.param_groups if counts_by_parameter(one) or counts_by_group(one) else ():
            for p in group["params"]:
                if not one.state[p]:
                    _create(one, p)


def _create(one: Any, p: torch.Tensor) -> None:
    if hasattr(one, "initialize_state"):  # Transformer Engine's, in the dtypes that it was given
        one.initialize_state(p, one.store_param_remainders and p.dtype == torch.bfloat16)
        return
    one.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    if counts_by_parameter(one):
        one.state[p]["step"] = torch.tensor(0.0)


def steps_taken(optimizer: Any) -> float:
    """0 where nothing was counted, as on a rank whose parameters are all frozen."""
    found = []
    for one in inner_optimizers(optimizer):
        if counts_by_parameter(one):
            found += [float(entry["step"]) for entry in one.state.values()]
        elif counts_by_group(one):
            found += [float(group.get("step", 0)) for group in one.param_groups]
    return max(found, default=0.0)


def set_steps(optimizer: Any, steps: float) -> None:
    for one in inner_optimizers(optimizer):
        if counts_by_parameter(one):
            for entry in one.state.values():
                entry["step"].fill_(steps)
        elif counts_by_group(one):
            for group in one.param_groups:
                group["step"] = int(steps)


def place_steps(part: dict[str, Any], one: Any, steps: float | None) -> None:
    """Put ``steps`` where the optimizer ``one`` looks for them in ``part``, of its own state from a
    file: param_groups and, unless the distributed optimizer keeps it apart, "state". None: as an
    older file has it in there.
    """
    moments = part.get("state", {})
    if counts_by_group(one):
        common = moments.pop("common_step", None)
        for group in part["param_groups"]:
            found = steps if steps is not None else common
            group["step"] = int(group.get("step", 0) if found is None else found)
    elif steps and "state" in part:  # rank 0 left it out if it has nothing to train
        moments.setdefault("common_step", torch.tensor(steps))
    elif "common_step" not in moments:  # which upstream leaves out where it is 0
        for entry in filter(None, moments.values()):
            entry["step"] = torch.tensor(0.0)
    if (
        counts_by_parameter(one) and "state" not in part
    ):  # the distributed optimizer asks all groups
        for group in part["param_groups"]:
            group.setdefault("step", steps or 0.0)
