"""The critic: a value of the state after every token, by a Megatron model with one output.

It may have a layout, a model and an optimizer of its own; by default all three are as the actor's.
It is trained on the returns that were computed from its values (``algos/value.py``). Entry t of a
row's values is about the state after token t, which is the state before target t: nothing is
shifted.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megarl.actor.fp8 import install_fp8
from megarl.actor.load import load_hf_weights
from megarl.actor.model import build_model, dtype_of
from megarl.actor.options import transformer_options
from megarl.actor.residence import WEIGHTS
from megarl.actor.setup import Parallel
from megarl.actor.state import load_model
from megarl.actor.step import OnOutput, RowResult, local, loss_scale, whole_row
from megarl.actor.trained import TrainedModel, in_training
from megarl.algos.value import value_loss
from megarl.config.algo import ValueSection
from megarl.config.schema import Config
from megarl.data.kept_rows import Fault
from megarl.errors import DataError
from megarl.hostcomm import broadcast_json
from megarl.models.hf_complete import open_model
from megarl.models.hf_io import HfCheckpoint
from megarl.models.spec import ModelSpec
from megarl.types import PackedBatch, StepMetrics, TrainPlan

HEAD = "output_layer.weight"  # where a policy has its output layer
_SCORE = "score.weight"  # [1, H], the head of a reward model in Hugging Face files
_EXTRA = (_SCORE, "lm_head.weight")


class ValueHead(torch.nn.Module):
    """Stands in for the output layer: hidden states [T / cp, 1, H], of sequence parallelism the
    rank's part of them, -> values f32 [T / cp, 1, 1], the same on all tensor-parallel ranks.

    It starts at zero: values that no one has learnt are 0, whatever the layout or the seed.
    """

    def __init__(self, config: Any, parallel: Parallel) -> None:
        super().__init__()
        zeros = torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(zeros.to(parallel.device))
        # Each rank sees its part of the sequence: Megatron is to sum their gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.split = config.sequence_parallel
        self.group = parallel.tp

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        values = F.linear(hidden.float(), self.weight.float())
        if self.split:  # the loss is computed on every rank: its gradient is cut, not summed
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.group
            )
        return values, None


@dataclass
class MegatronCritic(TrainedModel):
    """Implements ``protocols.Critic``."""

    spec: ModelSpec
    section: ValueSection

    area = "critic"
    whose = "critic"

    def values(self, plan: TrainPlan) -> None:
        """Fill every row's ``values`` from the current weights (last stage only), in place of
        recorded ones.
        """
        with self.resident(WEIGHTS):
            for rows in plan.steps:
                self.record(rows, _record_values(self.parallel))

    def train(self, plan: TrainPlan) -> StepMetrics:
        """Every optimizer step of the plan, towards the rows' ``returns``; one without a trained
        token is left out.
        """
        return self.take_steps(plan, self.forward_backward)

    def forward_backward(
        self, rows: list[PackedBatch], trained_tokens: int
    ) -> tuple[StepMetrics, list[Fault]]:
        """``gradients`` of the value loss, a mean over ``trained_tokens``."""
        loss = _regression(self.section, 1.0 / trained_tokens, self.parallel, len(rows))
        return self.gradients(rows, loss)


def _record_values(parallel: Parallel) -> OnOutput:
    def finish(
        row: PackedBatch, index: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        (row.values,) = whole_row(row, parallel, output[0, :, 0])
        return output.float().sum() * 0.0, None

    return finish


def _regression(
    section: ValueSection, weight: float, parallel: Parallel, num_microbatches: int
) -> OnOutput:
    """The value loss with ``weight`` a token and the scale that ``step.py`` derives."""
    scale = loss_scale(parallel, num_microbatches)

    def finish(
        row: PackedBatch, index: torch.Tensor, output: torch.Tensor
    ) -> tuple[torch.Tensor, RowResult]:
        assert row.values is not None and row.returns is not None, "of the passes before"
        old, returns, mask = (
            local(x, index=index, device=parallel.device)
            for x in (row.values, row.returns, row.mask)
        )
        values = output[0, :, 0].float()
        finite = torch.stack([x.isfinite() for x in (values.detach(), old, returns)]).all(0)
        weights = torch.full_like(returns, weight)
        found = value_loss(section, values, old, returns, weights, mask & finite)
        metrics = found.metrics if parallel.speaks_for_tokens else []
        result = RowResult.of(metrics, row, index, mask & ~finite, values)
        return (found.loss * scale).float(), result

    return finish


def build_critic(
    config: Config, spec: ModelSpec, parallel: Parallel, optimizer_steps: int
) -> MegatronCritic:
    """A model of ``spec`` with a value head in place of the output layer, with the weights of
    ``config.critic_hf`` below it. Where ``config.critic_load`` is set, weights are loaded
    afterwards (``load_start``). Collective.
    """
    dtype = dtype_of(config.precision)
    untied = replace(spec, tie_embeddings=False, mtp_layers=0)
    source = None
    if config.critic_load is None:
        source = open_model(config.critic_hf, spec, extra=_EXTRA)
    with parallel.active():
        core = build_model(untied, parallel, dtype, transformer_options(config, spec))
        install_fp8(core, parallel, config.precision.fp8)
        if core[-1].post_process:
            core[-1].output_layer = ValueHead(core[-1].config, parallel)
        if source is not None:
            load_hf_weights(core, source, spec, parallel, but=HEAD, extra=_EXTRA)
            if core[-1].post_process and _SCORE in source.names():
                _copy_score(source, core[-1].output_layer.weight)
        own = config.model_copy(update={"optim": config.critic_optim})
        training = in_training(core, dtype, own, optimizer_steps)
    critic = MegatronCritic(
        parallel=parallel,
        **training,
        spec=spec,
        section=config.algo.value or ValueSection(),
    )
    if config.memory.offload == "idle":
        critic.offload()
    return critic


def load_start(critic: MegatronCritic, checkpoint: Path) -> None:
    """The weights of a checkpoint's critic, or, where it has none, of its policy, which leave the
    head as it is; rank 0 sees which it is. Collective.
    """
    own, policy = checkpoint / "critic", checkpoint / "megatron"
    with critic.resident():
        if broadcast_json(own.is_dir(), 0, critic.parallel.host):
            load_model(critic.model, critic.parallel, own)
        else:
            load_model(critic.model, critic.parallel, policy, but=HEAD)
        critic.optimizer.reload_model_params()


def _copy_score(checkpoint: HfCheckpoint, weight: torch.nn.Parameter) -> None:
    shape = checkpoint.shape(_SCORE)
    if shape != tuple(weight.shape):
        accepted = f"{list(weight.shape)}: a reward model with one output"
        raise DataError(f"{checkpoint.folder}: {_SCORE} is {list(shape)}; accepted: {accepted}")
    with torch.no_grad():
        weight.copy_(checkpoint.get(_SCORE))
