"""What workers do: build, load, save, look. In those of ``te_pool`` layers are made of Transformer
Engine's modules, in those of ``local_pool`` of Megatron's own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE

from megarl.actor.actor import MegatronActor
from megarl.actor.adam import inner_optimizers
from megarl.actor.load import tp_place
from megarl.actor.names import global_weights, unwrap
from megarl.actor.optimizer import implementations
from megarl.actor.state import load_model, load_trained, save_model, save_trained
from tests.actor.work import config_for, make_actor
from tests.actor.work_state import Trainee, with_trainee

Layout = dict[str, int]
T = TypeVar("T")
IMPL = "transformer_engine" if HAVE_TE else "local"


def build(hf: Path, layout: Layout, **sections: Any) -> MegatronActor:
    """An actor with the weights of ``hf``, in bf16 unless the sections say otherwise."""
    sections.setdefault("precision", {"dtype": "bf16"})
    train = {"transformer_impl": IMPL, "row_tokens": 96, **sections.get("train", {})}
    return make_actor(config_for(hf, **{**sections, "train": train}), layout)


def with_actor(use: Callable[[MegatronActor], T], hf: Path, layout: Layout, **sections: Any) -> T:
    try:
        return use(build(hf, layout, **sections))
    finally:
        parallel_state.destroy_model_parallel()


def parameters(
    rank: int, hf: Path, layout: Layout, **sections: Any
) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Global name -> (shape here, place among the ranks that share it, how many these are)."""

    def look(actor: MegatronActor) -> dict[str, tuple[tuple[int, ...], int, int]]:
        mapping, parallel = actor.weights().mapping, actor.parallel
        return {
            name: (tuple(weight.shape), *tp_place(name, mapping, parallel))
            for name, weight in global_weights(actor.model, parallel)
        }

    return with_actor(look, hf, layout, **sections)


def modules(rank: int, hf: Path, layout: Layout, **sections: Any) -> dict[str, Any]:
    """Name -> class of this rank's modules; and the optimizers' classes."""

    def look(actor: MegatronActor) -> dict[str, Any]:
        return {
            "modules": {
                name: type(module).__name__
                for chunk in actor.model
                for name, module in unwrap(chunk).named_modules()
            },
            "optimizers": implementations(actor.optimizer),
        }

    return with_actor(look, hf, layout, **sections)


def exported(rank: int, hf: Path, layout: Layout, **sections: Any) -> dict[str, torch.Tensor]:
    """What an actor that was given ``hf`` exports."""
    return with_actor(weights, hf, layout, **sections)


def saved(rank: int, hf: Path, layout: Layout, path: Path, **sections: Any) -> None:
    """Write the model's weights to a file of Megatron's."""

    def save(actor: MegatronActor) -> None:
        make_folder(path)
        save_model(actor.model, actor.parallel, path)

    with_actor(save, hf, layout, **sections)


def loaded(
    rank: int, hf: Path, layout: Layout, path: Path, **sections: Any
) -> dict[str, torch.Tensor]:
    """What an actor with other weights exports once it has read the file."""

    def load(actor: MegatronActor) -> dict[str, torch.Tensor]:
        spoil(actor)
        load_model(actor.model, actor.parallel, path)
        return weights(actor)

    return with_actor(load, hf, layout, **sections)


def weights(actor: MegatronActor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.weights().tensors()}


def spoil(actor: MegatronActor) -> None:
    """Nothing that a load should bring is there by chance."""
    with torch.no_grad():
        for _, tensor in global_weights(actor.model, actor.parallel):
            tensor.add_(0.25)


def make_folder(path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()


def passed_through_fused_adam(
    rank: int, hf: Path, layout: Layout, path: Path, out: Path, **sections: Any
) -> dict[str, Any]:
    """Load what was trained, save it again, and say what the optimizers made of it."""

    def again(trainee: Trainee) -> dict[str, Any]:
        trainee.spoil()
        load_trained(trainee.actor, path)
        inner = inner_optimizers(trainee.actor.optimizer)
        make_folder(out)
        save_trained(trainee.actor, out)
        return {
            "optimizers": implementations(trainee.actor.optimizer),
            "steps": [group["step"] for one in inner for group in one.param_groups],
            "moments": {key for one in inner for state in one.state.values() for key in state},
        }

    return with_trainee(hf, layout, sections, again)
