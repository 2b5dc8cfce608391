"""What workers do in tests of an actor's state: train, save, load, train on."""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megarl.actor.actor import MegatronActor
from megarl.actor.state import load_model, load_trained, save_model, save_trained
from megarl.actor.whole_model import whole_model_logprobs
from megarl.errors import DataError
from megarl.models.spec import read_spec
from megarl.types import Max
from tests.actor.work import config_for, make_actor, prepare
from tests.helpers.samples import random_samples

Layout = dict[str, int]


class Trainee:
    """An actor on made-up rollouts: what step ``k`` trains depends on ``k`` alone."""

    def __init__(self, hf: Path, layout: Layout, sections: dict[str, Any]) -> None:
        self.config = config_for(hf, **sections)
        self.actor: MegatronActor = make_actor(self.config, layout)
        self.lrs: list[float] = []

    def steps(self, first: int, last: int) -> None:
        """Optimizer steps ``first`` to ``last - 1``."""
        for k in range(first, last):
            plan = prepare(self.actor, self.config, random_samples(4, 4, seed=k))
            metrics = self.actor.train(plan)
            values = {m.name: m.value for m in metrics}
            lr = values["optim/lr"]
            assert isinstance(lr, Max)
            self.lrs.append(lr.value)

    def weights(self) -> dict[str, torch.Tensor]:
        """Under HF names, of this rank's stage, on the stage's sender."""
        return {n: t.clone() for n, t in self.actor.weights().tensors()}

    def spoil(self) -> None:
        """Other weights everywhere: nothing that a load should bring is there by chance."""
        with torch.no_grad():
            for chunk in self.actor.model:
                biases = (b for n, b in chunk.named_buffers() if n.endswith("expert_bias"))
                for tensor in (*chunk.parameters(), *biases):
                    tensor.add_(0.25)
        self.actor.optimizer.reload_model_params()


def trained_on(
    rank: int, hf: Path, layout: Layout, path: Path, save_at: int, until: int, **sections: Any
) -> dict[str, Any]:
    """Train to ``until``; on the way, save at step ``save_at``."""
    return with_trainee(hf, layout, sections, lambda t: _train_and_save(t, path, save_at, until))


def resumed(
    rank: int, hf: Path, layout: Layout, path: Path, save_at: int, until: int, **sections: Any
) -> dict[str, Any]:
    """The rest of the way, by a fresh actor that was given the file."""

    def rest(trainee: Trainee) -> dict[str, Any]:
        trainee.spoil()
        load_trained(trainee.actor, path)
        return _report(trainee, save_at, until)

    return with_trainee(hf, layout, sections, rest)


def passed_on(rank: int, hf: Path, layout: Layout, path: Path, out: Path, **sections: Any) -> None:
    """Load, and save again without a step between."""

    def again(trainee: Trainee) -> None:
        trainee.spoil()
        load_trained(trainee.actor, path)
        _folder(rank, out)
        save_trained(trainee.actor, out)

    with_trainee(hf, layout, sections, again)


def resumed_without_moments(
    rank: int, hf: Path, layout: Layout, path: Path, save_at: int, until: int, **sections: Any
) -> dict[str, Any]:
    """What a load that loses the optimizer's moments would give."""

    def rest(trainee: Trainee) -> dict[str, Any]:
        load_trained(trainee.actor, path)
        for part in getattr(
            trainee.actor.optimizer, "chained_optimizers", [trainee.actor.optimizer]
        ):
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
        return _report(trainee, save_at, until)

    return with_trainee(hf, layout, sections, rest)


def loaded_weights(
    rank: int, hf: Path, layout: Layout, path: Path, **sections: Any
) -> dict[str, torch.Tensor]:
    """Weights alone, from either kind of file."""

    def load(trainee: Trainee) -> dict[str, torch.Tensor]:
        trainee.spoil()
        load_model(trainee.actor.model, trainee.actor.parallel, path)
        return trainee.weights()

    return with_trainee(hf, layout, sections, load)


def saved_weights(rank: int, hf: Path, layout: Layout, path: Path) -> dict[str, torch.Tensor]:
    """Save the model without optimizer."""

    def save(trainee: Trainee) -> dict[str, torch.Tensor]:
        _folder(rank, path)
        save_model(trainee.actor.model, trainee.actor.parallel, path)
        return trainee.weights()

    return with_trainee(hf, layout, {}, save)


def load_refused(rank: int, hf: Path, layout: Layout, path: Path, **sections: Any) -> str:
    """What ``load_trained`` says of a checkpoint that does not fit the settings."""

    def load(trainee: Trainee) -> str:
        try:
            load_trained(trainee.actor, path)
        except DataError as error:
            return str(error)
        return "it fits"

    return with_trainee(hf, layout, sections, load)


def refusals(rank: int, hf: Path, layout: Layout, path: Path) -> list[str]:
    """What loading from a folder without a checkpoint says, by each of the two functions."""

    def load(trainee: Trainee) -> list[str]:
        texts = []
        for attempt in (
            lambda: load_model(trainee.actor.model, trainee.actor.parallel, path),
            lambda: load_trained(trainee.actor, path),
        ):
            try:
                attempt()
            except DataError as error:
                texts.append(str(error))
        return texts

    return with_trainee(hf, layout, {}, load)


def _train_and_save(trainee: Trainee, path: Path, save_at: int, until: int) -> dict[str, Any]:
    trainee.steps(0, save_at)
    _folder(dist.get_rank(), path)
    save_trained(trainee.actor, path)
    return _report(trainee, save_at, until)


def _report(trainee: Trainee, save_at: int, until: int) -> dict[str, Any]:
    before, trainee.lrs = trainee.weights(), []
    trainee.steps(save_at, until)
    return {"before": before, "after": trainee.weights(), "lrs": trainee.lrs}


def _folder(rank: int, path: Path) -> None:
    if rank == 0:
        path.mkdir(parents=True)
    dist.barrier()


def with_trainee(
    hf: Path, layout: Layout, sections: dict[str, Any], use: Callable[[Trainee], Any]
) -> Any:
    """Megatron's writer passes its results through a queue in a helper process, which a worker, as
    a daemon, may not start; they come from threads of this process, whose own queue will do.
    """
    filesystem_async._results_queue = queue.Queue()
    try:
        return use(Trainee(hf, layout, {"algo": ONE_STEP, **sections}))
    finally:
        parallel_state.destroy_model_parallel()


ONE_STEP = {"policy": {"name": "gspo"}, "minibatches": 1}


def whole_logprobs(
    rank: int, models: dict[str, tuple[Path, Path]], tokens: list[int]
) -> dict[str, torch.Tensor]:
    """Of checkpoints, by name: (Hugging Face folder, weights)."""
    return {
        name: whole_model_logprobs(weights, read_spec(hf), tokens)
        for name, (hf, weights) in models.items()
    }
