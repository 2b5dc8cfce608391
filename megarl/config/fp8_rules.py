"""What ``precision.fp8`` needs: of other settings, of the model's layers, and of the machine.

What Transformer Engine can multiply, by recipe: per-tensor scales from compute capability 8.9 on,
blocks of 128 from 9.0 with CUDA 12.9, mxfp8 on 10.x (of 12.x not every layout of operands). From
10.0 on it multiplies blocks of 128 as mxfp8, whose scales are powers of two, and its products
refuse others. A model's widths are checked once it is built (``actor/fp8_active.py``).
Source: transformer_engine/pytorch/quantization.py 2.20 (``_compute_*_support``), its
common/gemm/cublaslt_gemm.cu, and what Megatron-core 0.19 refuses (``TransformerConfig``) or its own
training program does (``training/arguments.py``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.config.fp8 import Fp8Section, contradictions, te_environment
from megarl.config.layout import Dims
from megarl.config.schema import Config, ParallelSection
from megarl.errors import Problem
from megarl.installed import TE_NEEDED, Gpu, Installed

KEY = "precision.fp8"
Version = tuple[int, int]


@dataclass(frozen=True)
class Needs:
    """Of a recipe: the least GPU, and the first that is too new, and CUDA."""

    gpu: Version
    cuda: Version = (12, 1)
    below: Version | None = None

    def fault(self, gpu: Gpu) -> str | None:
        """Why it does not run on ``gpu``."""
        major, minor = gpu.capability
        if gpu.capability < self.gpu or (self.below and gpu.capability >= self.below):
            return f"the GPUs here have compute capability {major}.{minor}"
        if gpu.cuda < self.cuda:
            return f"torch is built for CUDA {gpu.cuda[0]}.{gpu.cuda[1]}"
        return None

    def __str__(self) -> str:
        below = f" and below {self.below[0]}.{self.below[1]}" if self.below else ""
        return (
            f"GPUs of compute capability {self.gpu[0]}.{self.gpu[1]} or higher{below}, with CUDA "
            f"{self.cuda[0]}.{self.cuda[1]} or newer"
        )


NEEDS: Mapping[str, Needs] = {
    "tensorwise": Needs((8, 9)),
    "delayed": Needs((8, 9)),
    "blockwise": Needs((9, 0), (12, 9)),
    "mxfp8": Needs((10, 0), (12, 8), below=(12, 0)),
}
BLOCKS_AS_MXFP8 = (10, 0)  # the first GPU where scales of blocks must be powers of two


def fp8_problems(
    config: Config, dims: Dims | None, critic_dims: Dims | None = None
) -> Iterator[Problem]:
    """Contradictions between settings. ``dims``: of the model, ``critic_dims``: of ``critic.hf``;
    None: not at hand, what they decide is not checked.
    """
    section = config.precision.fp8
    if section is None:
        return
    if config.precision.dtype != "bf16":
        accepted = f"bf16, or {KEY}: null: what is not in FP8 is bf16"
        yield Problem("precision.dtype", config.precision.dtype, accepted)
    if section.recipe == "delayed":
        for name, count in _ends(section).items():
            accepted = "0, or another recipe: delayed updates the scales of all layers at once"
            yield Problem(name, str(count), accepted)
        recompute = config.recompute
        if recompute.granularity == "selective" and "layernorm" in recompute.modules:
            accepted = f"other modules, or another recipe than delayed ({KEY}.recipe)"
            yield Problem("recompute.modules", "layernorm", accepted)
    else:
        yield from _layers(section, dims, config.parallel, "")
        if config.critic.lr is not None:
            other = critic_dims if config.critic.hf else dims
            yield from _layers(section, other, config.critic_parallel, " of the critic")
    fusion = config.train.gradient_accumulation_fusion
    if section.backend == "emulated" and fusion == "always":
        accepted = f"auto, never: {KEY}.backend=emulated returns the gradients of weights"
        yield Problem("train.gradient_accumulation_fusion", fusion, accepted)
    if section.param_gather and section.backend == "te":
        yield from _param_gather(config, section)


def _ends(section: Fp8Section) -> dict[str, int]:
    counts = {
        f"{KEY}.first_layers_bf16": section.first_layers_bf16,
        f"{KEY}.last_layers_bf16": section.last_layers_bf16,
    }
    return {name: count for name, count in counts.items() if count}


def _layers(
    section: Fp8Section, dims: Dims | None, p: ParallelSection, whose: str
) -> Iterator[Problem]:
    ends = _ends(section)
    if dims is None or not dims.layers or not ends:
        return
    if sum(ends.values()) >= dims.layers:
        found = " + ".join(str(count) for count in ends.values())
        accepted = f"fewer than num_hidden_layers = {dims.layers}{whose}: the rest is in FP8"
        yield Problem(" and ".join(ends), found, accepted)
        return
    most = dims.layers // p.pp
    for name, count in ends.items():
        if section.backend == "te" and count > most:
            accepted = f"at most the {most} layers of a pipeline stage{whose}"
            yield Problem(name, str(count), accepted)


def _param_gather(config: Config, section: Fp8Section) -> Iterator[Problem]:
    """What Megatron's training program demands, and what of this one moves parameters as bf16."""
    key = f"{KEY}.param_gather"
    if not config.optim.distributed:
        accepted = f"true: {key} gathers what the distributed optimizer has split"
        yield Problem("optim.distributed", "false", accepted)
    if config.critic.lr is not None and not config.critic_optim.distributed:
        yield Problem("critic.optim.distributed", "false", f"true: {key} is of the critic, too")
    if config.optim.cpu_offload is not None and section.recipe != "delayed":
        accepted = f"null, or {KEY}.recipe=delayed, with {key}"
        yield Problem("optim.cpu_offload", "a section", accepted)
    if config.memory.offload != "none":
        yield Problem("memory.offload", config.memory.offload, f"none, with {key}")
    if section.recipe == "mxfp8" and config.overlap.param_gather:
        accepted = f"false: with mxfp8, {key} gathers parameters in the memory of gradients"
        yield Problem("overlap.param_gather", "true", accepted)
    loads = {"model.load": config.model.load}
    if config.critic.lr is not None:
        loads["critic.load"] = config.critic.load
    for name, path in loads.items():
        if path is not None:
            accepted = f"null: with {key} the main parameters would start from rounded ones"
            yield Problem(name, str(path), accepted)


def fp8_hardware(config: Config, num_gpus: int, found: Installed) -> Iterator[Problem]:
    """What Transformer Engine needs of this machine. One problem: the first missing thing."""
    section = config.precision.fp8
    if section is None or section.backend != "te":
        return
    needs, key = NEEDS[section.recipe], f"{KEY}.backend"
    version = f"{TE_NEEDED[0]}.{TE_NEEDED[1]} or newer"
    engine, gpu = found.transformer_engine, found.gpu
    otherwise = "emulated, or "
    if not engine:
        there = "it is not installed"
        yield Problem(key, "te", f"{otherwise}Transformer Engine {version} ({there})")
    elif found.engine_fault is not None:
        accepted = f"{otherwise}a Transformer Engine that works. {found.engine_fault}"
        yield Problem(key, "te", accepted)
    elif engine < TE_NEEDED:
        there = f"{engine[0]}.{engine[1]} is installed"
        yield Problem(key, "te", f"{otherwise}Transformer Engine {version} ({there})")
    elif num_gpus == 0:
        yield Problem(key, "te", f"{otherwise}{needs} (there are none)")
    elif gpu is not None and (fault := needs.fault(gpu)) is not None:
        yield Problem(f"{KEY}.recipe", section.recipe, f"{_runs_here(gpu)} here ({fault})")
    elif gpu is not None:
        yield from _scales(section, gpu)
    wanted = te_environment(section)
    for name, value in contradictions(section, found.engine_switches).items():
        accepted = f"not set, or {wanted[name]}" if wanted[name] is not None else "not set"
        accepted += f": {KEY} decides"
        yield Problem(f"environment variable {name}", value, accepted)


def _scales(section: Fp8Section, gpu: Gpu) -> Iterator[Problem]:
    chosen = section.recipe == "blockwise" and section.scales == "f32"
    if chosen and gpu.capability >= BLOCKS_AS_MXFP8:
        accepted = (
            "power_of_two, on GPUs of compute capability {}.{}: Transformer Engine multiplies "
        )
        accepted = accepted.format(*gpu.capability) + "blocks as mxfp8"
        yield Problem(f"{KEY}.scales", section.scales, accepted)


def _runs_here(gpu: Gpu) -> str:
    recipes = [name for name, needs in NEEDS.items() if needs.fault(gpu) is None]
    return ", ".join(recipes) or f"{KEY}: null, or backend=emulated; no recipe runs"
