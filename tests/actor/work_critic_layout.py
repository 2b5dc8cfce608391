"""What workers do in tests of a critic in a layout of its own. As ``work.py``: workers only."""

import ast
import inspect
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.actor.actor import build_actor
from megarl.actor.setup import init_beside, init_parallel, layout_variables
from megarl.types import Sample
from tests.actor import work
from tests.actor.compare import mesh_of
from tests.actor.work_critic import Layout, Subject


def step_beside(
    rank: int, hf: Path, actor: Layout, critic: Layout, samples: list[Sample], head: torch.Tensor
) -> dict[str, Any]:
    """The first optimizer step of both models, one after the other, as the loop takes them."""
    try:
        subject = Subject(hf, critic, head, actor)
        policy = build_actor(subject.config, subject.spec, subject.first, 100)
        before = layout_variables()
        own, plan = subject.plans(samples)
        policy.forward_backward(plan.steps[0])
        policy_gradients = work.gradients(policy)
        policy.update()
        metrics, nonfinite = subject.critic.forward_backward(own.steps[0], own.trained_tokens[0])
        gradients = subject.whole(lambda p: p.main_grad)
        metrics += subject.critic.update()
        assert not nonfinite
        return {
            "metrics": [metrics],
            "gradients": gradients,
            "policy": policy_gradients,
            "weights": subject.weights(),
            "undisturbed": _same(before, layout_variables()),
        }
    finally:
        parallel_state.destroy_model_parallel()


def variables(rank: int, first: Layout, second: Layout) -> dict[str, Any]:
    """What upstream may change of its module, what of it is known as a layout's, and what the
    second layout's place says inside and outside ``active``.
    """
    tree = ast.parse(inspect.getsource(parallel_state))
    changed = {n for node in ast.walk(tree) if isinstance(node, ast.Global) for n in node.names}
    try:
        one = init_parallel(mesh_of(first), seed=1, timeout_s=60)
        two = init_beside(one, mesh_of(second), timeout_s=60)
        outside = _degrees()
        with two.active():
            inside = _degrees()
            groups = [g.size() for g in (two.tp, two.cp, two.pp, two.dp_cp)]
        return {
            "changed": changed,
            "known": set(layout_variables()),
            "outside": [outside, _degrees()],
            "inside": inside,
            "groups": groups,
        }
    finally:
        parallel_state.destroy_model_parallel()


def _degrees() -> dict[str, int]:
    ask: Any = parallel_state
    return {
        "tp": ask.get_tensor_model_parallel_world_size(),
        "pp": ask.get_pipeline_model_parallel_world_size(),
        "cp": ask.get_context_parallel_world_size(),
        "dp": ask.get_data_parallel_world_size(),
        "ep": ask.get_expert_model_parallel_world_size(),
        "vpp": ask.get_virtual_pipeline_model_parallel_world_size() or 1,
    }


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    skip = "_GLOBAL_MEMORY_BUFFER"
    return one.keys() == two.keys() and all(one[k] is two[k] or k == skip for k in one)
