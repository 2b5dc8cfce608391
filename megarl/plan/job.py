"""A plan: the model of a configuration in its layout on so many GPUs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from megarl.config.files import read_hf_config
from megarl.config.fp8 import Fp8Section, row_alignment
from megarl.config.fp8_rules import fp8_problems
from megarl.config.layout import Dims, layout_problems
from megarl.config.load import load_config, split_arguments
from megarl.config.schema import Config
from megarl.errors import ConfigError, Problem
from megarl.mesh import Mesh
from megarl.models.settings import described_spec, model_spec
from megarl.models.spec import ModelSpec
from megarl.plan.choices import Choices, Recompute, Rows, choices_of
from megarl.plan.memory import GIB, StageMemory, plan_memory
from megarl.plan.parameters import total_parameters
from megarl.plan.traffic import Traffic, bubble, rollout_bytes, step_traffic

_NO_FOLDER = Path("no-folder")
# What a run must have and no number here depends on: a file of configs/models/ is enough.
_BENEATH = {
    "run": {"dir": "no-run", "steps": 1},
    "model": {"hf": str(_NO_FOLDER)},
    "optim": {"lr": 1e-6},
    "algo": {"policy": {"name": "gspo"}},
}


@dataclass(frozen=True)
class Job:
    """What is planned. ``hf``: config.json's values. ``sample_tokens``: of a sample, on average."""

    config: Config
    spec: ModelSpec
    hf: Mapping[str, Any]
    gpus: int
    gpu_bytes: float
    sample_tokens: int

    @property
    def samples(self) -> int:
        """Of one optimizer step."""
        data = self.config.data
        per_prompt = data.samples_per_prompt if self.config.run.mode == "rl" else 1
        return data.prompts_per_step * per_prompt // self.config.algo.minibatches

    @property
    def row_tokens(self) -> int:
        return self.config.train.row_tokens

    def rows(self, mesh: Mesh) -> Rows:
        """A rank's rows of an optimizer step, if its share of the samples fills them."""
        share = math.ceil(self.samples / mesh.dp)
        count = math.ceil(share * self.sample_tokens / self.row_tokens)
        count = math.ceil(count / mesh.rows_multiple) * mesh.rows_multiple
        return Rows(self.row_tokens, self.sample_tokens, count)


@dataclass(frozen=True)
class Plan:
    job: Job
    mesh: Mesh
    choices: Choices
    rows: Rows
    stages: list[StageMemory]
    traffic: list[Traffic]

    @property
    def heaviest(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        return self.heaviest.total <= self.job.gpu_bytes

    @property
    def rollouts(self) -> tuple[int, int]:
        """Bytes of a training step's samples that a rank gets at most: without recorded routing,
        and with it.
        """
        job, mesh = self.job, self.mesh
        share = math.ceil(job.samples * job.config.algo.minibatches / mesh.dp)
        lengths = [job.sample_tokens] * share
        plain, routed = (
            max(rollout_bytes(job.spec, mesh, r, lengths, routing=x) for r in range(mesh.pp))
            for x in (False, True)
        )
        return plain, routed

    @property
    def bubble(self) -> float:
        return bubble(self.mesh, self.rows.count)


def read_job(
    arguments: Sequence[str],
    *,
    gpus: int,
    gpu_gib: float,
    sample_tokens: int | None,
    fp8: bool = False,
) -> Job:
    """``fp8``: as if ``precision.fp8`` were there, with its defaults.

    Raises ConfigError for settings that are wrong in themselves, DataError for a model that is not
    supported.
    """
    config = load_config(*split_arguments(arguments), beneath=_BENEATH)
    if fp8 and config.precision.fp8 is None:
        precision = config.precision.model_copy(update={"fp8": Fp8Section()})
        config = config.model_copy(update={"precision": precision})
    hf: Mapping[str, Any] | None
    if config.model.hf != _NO_FOLDER:
        spec, hf = model_spec(config.model), read_hf_config(config.model.hf)
    elif config.model.config is not None:
        spec, hf = described_spec(config.model), config.model.config
    else:
        accepted = "the architecture (a file of configs/models/), or model.hf, a folder with it"
        raise ConfigError([Problem("model.config", "nothing", accepted)])
    assert hf is not None
    tokens = config.train.row_tokens if sample_tokens is None else sample_tokens
    return Job(config, spec, hf, gpus, gpu_gib * GIB, tokens)


def layout_of(job: Job) -> Mesh:
    """The configuration's layout; ``parallel.dp`` is what the GPUs leave if it is not set.

    Raises ConfigError with every reason why this model cannot be split so on so many GPUs.
    """
    p = job.config.parallel
    given = "dp" in p.model_fields_set
    dp = p.dp if given else max(1, job.gpus // (p.tp * p.pp * p.cp))
    mesh = mesh_with(job.config, dp)
    config = job.config.model_copy(update={"parallel": p.model_copy(update={"dp": dp})})
    problems = [
        *layout_problems(config, job.gpus, job.hf),
        *_fp8(job),
        *_room(job),
        *_samples(job, dp),
    ]
    if problems:
        raise ConfigError(problems)
    return mesh


def plan_job(job: Job, mesh: Mesh, choices: Choices) -> Plan:
    rows = job.rows(mesh)
    critic = job.config.critic.lr is not None
    stages = plan_memory(job.spec, mesh, choices, rows, critic=critic)
    return Plan(job, mesh, choices, rows, stages, step_traffic(job.spec, mesh, choices, rows))


def what_if(
    job: Job, recompute: Recompute | None, *, offload_optimizer: bool
) -> tuple[Choices, list[Choices]]:
    """(the settings' choices with those of the command line, what suggestions may take besides):
    every way of recomputation, from none to all, unless the command line names one.
    """
    found = choices_of(job.config)
    if offload_optimizer:
        found = replace(found, offloaded=1.0)
    if recompute is not None:
        found = replace(found, recompute=recompute)
        return found, [found]
    return found, [replace(found, recompute=way) for way in get_args(Recompute)]


def mesh_with(config: Config, dp: int) -> Mesh:
    p = config.parallel
    return Mesh(
        tp=p.tp,
        pp=p.pp,
        cp=p.cp,
        dp=dp,
        ep=p.ep,
        etp=p.etp or p.tp,
        vpp=p.vpp,
        first_layers=p.first_layers,
        last_layers=p.last_layers,
        align=row_alignment(config.precision.fp8),
    )


def _fp8(job: Job) -> Iterator[Problem]:
    section = job.config.precision.fp8
    yield from fp8_problems(job.config, Dims.of(job.hf))
    if section is not None and section.backend != "te":
        accepted = "te: what an emulation holds in memory is not planned"
        yield Problem("precision.fp8.backend", section.backend, accepted)


def _room(job: Job) -> Iterator[Problem]:
    """Weights and gradients alone, in bf16 and fp32, split over all GPUs without a remainder."""
    total = 6 * total_parameters(job.spec)
    if total > job.gpus * job.gpu_bytes:
        found = f"{job.gpus} of {job.gpu_bytes / GIB:g} GiB"
        needed = f"{total / GIB:,.0f} GiB of weights and gradients, whatever the layout"
        yield Problem("--gpus", found, f"at least {math.ceil(total / job.gpu_bytes)}: {needed}")


def _samples(job: Job, dp: int) -> Iterator[Problem]:
    if job.samples < dp:
        accepted = f"at least {dp} samples an optimizer step, one for each of dp {dp} ranks"
        yield Problem("data.prompts_per_step", f"{job.samples} samples an optimizer step", accepted)
