"""What the workers of the pool do in actor tests. Every function gets ``rank`` and plain arguments.

Imported by workers only: importing Megatron patches the process for CPU (``actor/cpu.py``), and the
test process also builds transformers models.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.actor.actor import MegatronActor, build_actor
from megarl.actor.arguments import transformer_config
from megarl.actor.export import MegatronWeights
from megarl.actor.names import global_parameters, unwrap
from megarl.actor.options import plain_options
from megarl.actor.setup import Parallel, init_parallel
from megarl.algos.control import Controllers
from megarl.config.schema import Config
from megarl.data.exchange import Collected
from megarl.data.nodes import Nodes
from megarl.data.recorded import read_samples, recorded_steps
from megarl.errors import MegarlError
from megarl.experience import complete_plan
from megarl.models.mapping import ModelMapping
from megarl.models.spec import read_spec
from megarl.parts import ranks_of
from megarl.planning import plan_step
from megarl.types import Sample, TrainPlan
from tests.actor.compare import mesh_of


def config_for(hf: Path, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused", "mode": "train_only", "steps": 4},
        "model": {"hf": str(hf)},
        "precision": {"dtype": "fp32"},
        "optim": {"lr": 1e-3, "distributed": False},
        "algo": {"policy": {"name": "gspo"}, "minibatches": 2},
        "train": {"row_tokens": 96},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return Config.model_validate(base)


def make_actor(config: Config, layout: dict[str, int]) -> MegatronActor:
    parallel = init_parallel(mesh_of(layout), seed=1, timeout_s=60)
    return build_actor(config, read_spec(config.model.hf), parallel, optimizer_steps=100)


def plan_for(actor: MegatronActor, config: Config, samples: list[Sample]) -> TrainPlan:
    """As far as rows go: every rank is given what it uses of samples that rank 0 alone has."""
    parallel = actor.parallel
    mesh, rank = parallel.mesh, parallel.rank
    nodes = Nodes((0,) * mesh.world_size, rank, parallel.host, leading=None, timeout_s=60)
    collected = [Collected(s.facts, 0, None if rank else s) for s in samples]
    return plan_step(collected, config, mesh, actor.spec, nodes)[0]


def prepare(actor: MegatronActor, config: Config, samples: list[Sample]) -> TrainPlan:
    """All that a step does before its update."""
    plan = plan_for(actor, config, samples)
    actor.logprobs(plan)
    complete_plan(plan, samples, config, Controllers.of(config.algo), ranks_of(actor.parallel))
    return plan


def gradients(actor: MegatronActor) -> dict[str, torch.Tensor]:
    """Reduced gradients of this rank's stage under HF names, on the stage's sender."""
    everything = [p for _, p in global_parameters(actor.model, actor.parallel)]
    parameters = [p for p in everything if p.requires_grad]
    data = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.clone()
    weights = MegatronWeights(actor.model, actor.spec, actor.parallel)
    found = dict(weights.tensors())
    for p, d in zip(parameters, data, strict=True):
        p.data = d
    still = untrained(weights.mapping)
    return {name: t.clone() for name, t in found.items() if name not in still}


def untrained(mapping: ModelMapping) -> set[str]:
    """HF tensors that have no gradient: multi-token prediction's, and biases of experts' choice."""
    names = [n for n in mapping.megatron_names() if n.startswith("mtp.") or "expert_bias" in n]
    return {hf for name in names for hf, _ in mapping.exported(name)}


def train(
    rank: int,
    hf: Path,
    recorded: Path,
    layout: dict[str, int],
    p2p_in_batches: bool = False,
    **sections: Any,
) -> dict[str, Any]:
    """What ``train_only`` does with a folder of recorded rollouts: metrics of every optimizer step,
    log-probs before, the first step's gradients, final weights. ``p2p_in_batches``: the other way
    stages may exchange activations and gradients, whatever the layout.
    """
    from megatron.core import parallel_state

    config = config_for(hf, **sections)
    actor = make_actor(config, layout)
    if p2p_in_batches:
        megatron = unwrap(actor.model[0]).config
        megatron.overlap_p2p_comm, megatron.batch_p2p_comm = False, True
    try:
        first = None
        history = []
        old: dict[tuple[int, int], torch.Tensor] = {}
        for step, path in recorded_steps(recorded):
            plan = prepare(actor, config, read_samples(path))
            for rows in plan.steps:
                found = (pair for row in rows for pair in by_sample(row, actor.parallel))
                old |= {(step, i): values for i, values in found}
                metrics, _ = actor.forward_backward(rows)
                if first is None and not config.optim.distributed:
                    first = gradients(actor)
                metrics += actor.update()
                history.append(metrics)
        actor.gather_parameters()
        weights = {n: t.clone() for n, t in actor.weights().tensors()}
        return {
            "metrics": history,
            "logprobs": old,
            "gradients": first or {},
            "weights": weights,
        }
    finally:
        parallel_state.destroy_model_parallel()


def logprobs(rank: int, hf: Path, layout: dict[str, int], samples: list[Sample]) -> dict[int, Any]:
    """Per-token log-probs of every sample (trained or not) on the ranks that hold them."""
    from megatron.core import parallel_state

    config = config_for(hf, algo={"minibatches": 1})
    actor = make_actor(config, layout)
    try:
        plan = plan_for(actor, config, samples)
        actor.logprobs(plan)
        return {i: values for row in plan.steps[0] for i, values in by_sample(row, actor.parallel)}
    finally:
        parallel_state.destroy_model_parallel()


def exported(rank: int, hf: Path, layout: dict[str, int], **sections: Any) -> dict[str, Any]:
    """What an actor that was given ``hf`` exports, and how its stage's layers lie in chunks."""
    from megatron.core import parallel_state

    actor = make_actor(config_for(hf, **sections), layout)
    try:
        layers = [
            [layer.layer_number - 1 for layer in unwrap(chunk).decoder.layers]
            for chunk in actor.model
        ]
        return {"tensors": {n: t.clone() for n, t in actor.weights().tensors()}, "layers": layers}
    finally:
        parallel_state.destroy_model_parallel()


def export_order(rank: int, hf: Path, layout: dict[str, int]) -> list[str]:
    """The first HF tensor of every weight, in the order in which they are gathered."""
    from megatron.core import parallel_state

    actor = make_actor(config_for(hf), layout)
    try:
        weights = MegatronWeights(actor.model, actor.spec, actor.parallel)
        return [weights.mapping.hf_names(name)[0] for name, _ in weights._stack_by_stack()]
    finally:
        parallel_state.destroy_model_parallel()


def upstream_layers(
    rank: int, hf: Path, layouts: list[tuple[dict[str, int], int]]
) -> list[list[list[list[int]]]]:
    """By layout and number of layers: the layers of every chunk of every stage as upstream builds
    them.
    """
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    def chunk(config: Any, stage: int, k: int) -> list[int]:
        first = get_transformer_layer_offset(config, vp_stage=k, pp_rank=stage)
        return list(range(first, first + get_num_layers_to_build(config, k, stage)))

    found = []
    for layout, layers in layouts:
        mesh = mesh_of(layout)
        spec = replace(read_spec(hf), layers=layers, moe_layers=(True,) * layers)
        config = transformer_config(spec, mesh, torch.float32, plain_options())
        stages = [[chunk(config, r, k) for k in range(mesh.vpp)] for r in range(mesh.pp)]
        found.append(stages)
    return found


def by_sample(row: Any, parallel: Parallel) -> Any:
    """(sample, log-probs of its tokens 1..L-1) of a row, on one of the ranks that have it."""
    if row.old_logprobs is None or not parallel.speaks_for_rows:
        return
    starts = row.cu_seqlens.tolist()
    for k, i in enumerate(row.samples):
        length = int(row.lengths[k])
        yield i, row.old_logprobs[starts[k] : starts[k] + length - 1].clone()


def logprob_gradients(
    rank: int, logits: list[list[float]], targets: list[int], vocab: int, temperature: float
) -> dict[str, torch.Tensor]:
    """Log-probs, entropy and a mixed gradient of logits split by columns over all workers."""
    import torch.distributed as dist

    from megarl.ops import logprob_entropy

    world = dist.get_world_size()
    local = torch.tensor(logits).chunk(world, dim=1)[rank].float().clone().requires_grad_()
    lp, entropy = logprob_entropy(
        local,
        torch.tensor(targets),
        vocab_size=vocab,
        temperature=temperature,
        group=dist.group.WORLD,
    )
    mix = lp @ torch.arange(1.0, 6.0) + entropy @ torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0])
    mix.backward()
    assert local.grad is not None
    return {"lp": lp.detach(), "entropy": entropy.detach(), "grad": local.grad}


def convert(rank: int, tool: str, source: Path, out: Path, **options: Any) -> str | None:
    """Run a converter of tools/ here; what it refused, or None."""
    import importlib.util

    path = Path(__file__).parents[2] / "tools" / f"{tool}.py"
    spec = importlib.util.spec_from_file_location(tool, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.convert(source, out, **options)
    except MegarlError as e:
        return f"{type(e).__name__}: {e}"
    return None
