"""What settings need of the machine: GPUs, and packages that Megatron takes kernels from."""

from collections.abc import Iterator

from megarl.config.fp8_rules import fp8_hardware
from megarl.config.schema import Config
from megarl.errors import Problem
from megarl.installed import TE_NEEDED, Installed


def hardware_problems(config: Config, num_gpus: int, found: Installed) -> Iterator[Problem]:
    """Everything asked for that this machine does not have."""
    yield from _layers(config, num_gpus, found)
    yield from _optimizer(config, num_gpus, found)
    yield from _experts(config, num_gpus, found)
    yield from fp8_hardware(config, num_gpus, found)
    recompute = config.recompute
    if recompute.granularity == "selective":
        for module in ("layernorm", "mla_up_proj"):
            if module in recompute.modules:
                yield from _needs_te(
                    found, num_gpus, (1, 0), "recompute.modules", module, "other modules"
                )
    if config.train.gradient_accumulation_fusion == "always" and not found.fused_wgrad:
        accepted = "auto, or NVIDIA's apex built with --cpp_ext --cuda_ext (its kernel "
        accepted += "fused_weight_gradient_mlp_cuda)"
        yield Problem("train.gradient_accumulation_fusion", "always", accepted)


def _layers(config: Config, num_gpus: int, found: Installed) -> Iterator[Problem]:
    key, impl = "train.transformer_impl", config.train.transformer_impl
    if impl == "transformer_engine":
        yield from _needs_te(found, num_gpus, TE_NEEDED, key, impl, "auto, local")


def _optimizer(config: Config, num_gpus: int, found: Installed) -> Iterator[Problem]:
    optim = config.optim
    if optim.name == "muon" and not found.muon:
        accepted = "adam, or the package emerging-optimizers 0.2 or newer (Python 3.12)"
        yield Problem("optim.name", "muon", accepted)
    if optim.precision_aware is not None and optim.cpu_offload is None:
        key = "optim.precision_aware"
        yield from _needs_te(found, num_gpus, (2, 1), key, "a section", "null")
    if optim.cpu_offload is not None and num_gpus == 0:
        accepted = "null: there is no GPU whose memory it would spare"
        yield Problem("optim.cpu_offload", "a section", accepted)


def _experts(config: Config, num_gpus: int, found: Installed) -> Iterator[Problem]:
    moe = config.moe
    if moe.token_dispatcher == "flex":
        there = {"deepep": found.deep_ep, "hybridep": found.hybrid_ep}[moe.flex_backend]
        if not there or num_gpus == 0:
            package = "deep_ep" + " with hybrid_ep" * (moe.flex_backend == "hybridep")
            accepted = f"alltoall, allgather, or GPUs and the package {package}"
            yield Problem("moe.token_dispatcher", f"flex ({moe.flex_backend})", accepted)
    for name, needed in (
        ("permute_fusion", (2, 1)),
        ("router_fusion", (2, 7)),
        ("grouped_gemm", (1, 11)),
    ):
        if getattr(moe, name):
            yield from _needs_te(found, num_gpus, needed, f"moe.{name}", "true", "false")


def _needs_te(
    found: Installed,
    num_gpus: int,
    needed: tuple[int, int],
    key: str,
    value: str,
    without: str,
) -> Iterator[Problem]:
    """On a machine without GPU it is left alone, installed or not (``actor/cpu.py``)."""
    there = found.transformer_engine
    if there < needed or num_gpus == 0:
        accepted = f"{without}, or GPUs and Transformer Engine {needed[0]}.{needed[1]} or newer"
        state = f"{there[0]}.{there[1]} is installed" if there else "it is not installed"
        gpus = "no GPU, " if num_gpus == 0 else ""
        yield Problem(key, value, f"{accepted} ({gpus}{state})")
