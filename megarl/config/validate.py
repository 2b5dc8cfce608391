"""What several settings imply together: every contradiction of a run, before anything is started.

Pure arithmetic and a look at the disk: no torch, no process group, no server. The parts:
``layout.py`` (model against parallel axes), ``lengths.py`` (responses and what holds them),
``files.py`` (paths), ``training.py`` (optimizer, schedules, memory), ``fp8_rules.py``,
``rollout_rules.py`` (servers, schedules), ``sync_rules.py`` (their weights), ``transport_rules.py``
(the way of weights), ``hardware.py`` (GPUs and packages), ``unused.py`` (no effect), and here
batches, modes and devices.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.config.algorithm import algorithm_problems
from megarl.config.fields import field_of, members
from megarl.config.files import file_problems
from megarl.config.fp8_rules import fp8_problems
from megarl.config.hardware import hardware_problems
from megarl.config.layout import Dims, layout_problems
from megarl.config.lengths import length_problems
from megarl.config.rollout_rules import rollout_problems
from megarl.config.schema import Config, ParallelSection
from megarl.config.sync_rules import sync_problems
from megarl.config.training import training_problems
from megarl.config.transport_rules import transport_problems
from megarl.config.unused import unused_settings
from megarl.errors import ConfigError, Problem
from megarl.installed import Installed

_WITHOUT_GROUP = ("reinforce_pp", "gae")  # advantages of a sample by itself
_SOURCE = {"rl": "prompts", "sft": "demonstrations", "train_only": "recorded"}


def validate(
    config: Config,
    *,
    world_size: int | None,
    num_gpus: int,
    hf_config: Mapping[str, Any] | None,
    critic_hf_config: Mapping[str, Any] | None = None,
    server_hf_config: Mapping[str, Any] | None = None,
    supported_models: Collection[str] | None = None,
    refused_models: Mapping[str, str] | None = None,
    check_paths: bool = True,
    packages: Installed | None = None,
) -> None:
    """Raise ConfigError with everything that is wrong; return None if nothing is.

    ``world_size`` None: not known yet, not compared. ``num_gpus``: devices of the whole job.
    ``hf_config``: the model's config.json (``files.read_hf_config``), None: not checked;
    ``critic_hf_config``: that of ``critic.hf``; ``server_hf_config``: of ``Config.server_hf``.
    ``supported_models``: the values of model_type that can be trained, None: not checked.
    ``refused_models``: others that are known, and why they cannot.
    ``packages``: what this machine has installed (``installed.py``), None: not checked.
    """
    refused = refused_models or {}
    dims = None if hf_config is None else Dims.of(hf_config)
    critic_dims = None if critic_hf_config is None else Dims.of(critic_hf_config)
    problems = [
        *_mode(config),
        *layout_problems(config, world_size, hf_config, critic_hf_config),
        *_model("model.hf", config.model.hf, hf_config, supported_models, refused),
        *_model("critic.hf", config.critic_hf, critic_hf_config, supported_models, refused),
        *algorithm_problems(config),
        *_batch(config),
        *_evaluations(config),
        *training_problems(config, dims),
        *fp8_problems(config, dims, critic_dims),
        *length_problems(config, hf_config),
        *rollout_problems(config, hf_config or {}),
        *sync_problems(config, hf_config, server_hf_config),
        *transport_problems(config),
        *_devices(config, num_gpus),
        *(file_problems(config) if check_paths else ()),
        *(() if packages is None else hardware_problems(config, num_gpus, packages)),
        *unused_settings(config, None if dims is None else dims.experts),
    ]
    if problems:
        raise ConfigError(problems)


def _mode(config: Config) -> Iterator[Problem]:
    mode, data = config.run.mode, config.data
    source = _SOURCE[mode]
    if getattr(data, source) is None:
        yield Problem(f"data.{source}", "nothing", f"a path: run.mode={mode} reads it")
    policy = config.algo.policy.name
    if (policy == "sft") != (mode == "sft"):
        others = [name for name in members(field_of(config, "algo.policy")) if name != "sft"]
        accepted = "sft" if mode == "sft" else ", ".join(others)
        yield Problem("algo.policy.name", policy, f"{accepted}, as run.mode={mode}")
    if mode != "rl":
        return
    unread = all(chosen.every for chosen in config.eval.sets)
    if config.eval.every and data.heldout is None and unread:
        yield Problem("data.heldout", "nothing", f"a file: eval.every={config.eval.every} reads it")
    prompts, heldout = data.prompts, data.heldout
    if prompts and heldout and prompts.resolve() == heldout.resolve():
        yield Problem(
            "data.heldout", "the file of data.prompts", "prompts that are never trained on"
        )
    if data.samples_per_prompt == 1 and (reason := _compares_samples(config)):
        yield Problem("data.samples_per_prompt", "1", f"at least 2: {reason}")


def _evaluations(config: Config) -> Iterator[Problem]:
    if config.run.mode != "rl":
        return
    trained, sets = config.data.prompts, config.eval.sets
    for i, chosen in enumerate(sets):
        key, count = f"eval.sets[{i}]", chosen.samples_per_prompt
        if any(chosen.name == other.name for other in sets[:i]):
            yield Problem(f"{key}.name", f"{chosen.name} again", "a name for each set")
        if trained is not None and chosen.prompts.resolve() == trained.resolve():
            accepted = "prompts that are never trained on"
            yield Problem(f"{key}.prompts", "the file of data.prompts", accepted)
        if not (chosen.every or config.eval.every):
            yield Problem(f"{key}.every", "nothing", "steps between evaluations, or eval.every")
        if count > 1 and chosen.temperature == 0:
            accepted = "1: greedy samples are all the same; or a temperature"
            yield Problem(f"{key}.samples_per_prompt", str(count), accepted)
        for key_of, value, off in (
            ("top_p", chosen.top_p, 1.0),
            ("top_k", chosen.top_k, None),
            ("min_p", chosen.min_p, 0.0),
        ):
            if chosen.temperature == 0 and value != off:
                accepted = f"nothing: {key}.temperature = 0 takes the likeliest token anyway"
                yield Problem(f"{key}.{key_of}", str(value), accepted)
        for k in chosen.pass_at:
            if not 1 <= k <= count:
                accepted = f"1 to {key}.samples_per_prompt = {count}"
                yield Problem(f"{key}.pass_at", str(k), accepted)


def _compares_samples(config: Config) -> str | None:
    """What needs several samples of a prompt, if anything."""
    advantage = config.algo.advantage
    if config.algo.dynamic_sampling is not None:
        return "algo.dynamic_sampling keeps prompts that have right and wrong samples"
    alone = advantage.name in _WITHOUT_GROUP or getattr(advantage, "singleton", None) == "raw"
    return None if alone else f"algo.advantage.name={advantage.name} compares samples of a prompt"


def _model(
    key: str,
    folder: Path,
    hf: Mapping[str, Any] | None,
    supported: Collection[str] | None,
    refused: Mapping[str, str],
) -> Iterator[Problem]:
    if hf is None or supported is None or not hf.get("model_type"):
        return
    family = hf["model_type"]
    if family not in supported:
        found = f"{folder}, whose model_type is {family}"
        why = f" ({family}: {refused[family]})" if family in refused else ""
        yield Problem(key, found, f"a model of type {', '.join(sorted(supported))}{why}")


def _batch(config: Config) -> Iterator[Problem]:
    data, minibatches = config.data, config.algo.minibatches
    key, dp = max(
        ((key, layout.dp) for key, layout in _layouts(config).items()), key=lambda x: x[1]
    )
    if config.run.mode == "train_only":  # the recording decides how many samples a step has
        return
    if data.prompts_per_step % minibatches:
        accepted = f"a multiple of algo.minibatches = {minibatches}"
        yield Problem("data.prompts_per_step", str(data.prompts_per_step), accepted)
    per_prompt = data.samples_per_prompt if config.run.mode == "rl" else 1
    if data.prompts_per_step * per_prompt < dp * minibatches:
        found = f"{data.prompts_per_step} (times {per_prompt} samples a prompt)"
        whose = "" if key == "parallel" else f" of {key}"
        accepted = f"a sample for each of dp {dp} ranks{whose} in each of {minibatches} minibatches"
        yield Problem("data.prompts_per_step", found, accepted)


def _layouts(config: Config) -> dict[str, ParallelSection]:
    """By key, those that differ in name."""
    found = {"parallel": config.parallel}
    if config.critic.parallel is not None:
        found["critic.parallel"] = config.critic.parallel
    return found


def _devices(config: Config, num_gpus: int) -> Iterator[Problem]:
    """NCCL wants a device of its own for every member of a group, trainer ranks and servers."""
    p = config.parallel
    ranks = p.tp * p.pp * p.cp * p.dp
    if 0 < num_gpus < ranks:
        found = f"{ranks} ranks for {num_gpus} GPUs"
        yield Problem("parallel", found, "a GPU for every rank (world size = tp * pp * cp * dp)")
    if config.run.mode != "rl" or config.sync.backend != "nccl":
        return
    if num_gpus < ranks:
        accepted = f"gloo, or {ranks} devices, one a rank"
        yield Problem("sync.backend", f"nccl with {num_gpus} devices", accepted)
    if not config.rollout.urls and not config.rollout.discover:
        found = "nccl with a server that the run starts, which shares its device with rank 0"
        yield Problem("sync.backend", found, "gloo or auto, or rollout.urls or discover")
