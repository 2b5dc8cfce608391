"""``megarl doctor``: what this machine has, and what would go wrong with it. Starts nothing.

Megatron-core, Transformer Engine and apex are looked at on disk, not imported: a broken one of them
breaks its importer, and finding that out is the point.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megarl.config.fp8_rules import NEEDS
from megarl.installed import (
    TE_NEEDED,
    Installed,
    apex_fault,
    engine_fault,
    installed,
    muon_fault,
    package_folder,
    version,
)

State = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """``bad``: megarl does not run like this. ``note``: worth knowing."""

    name: str
    state: State
    detail: str


def examine() -> list[Finding]:
    return [
        *_python(),
        *_torch(),
        _native(),
        _package("megatron-core", required="0.19.2"),
        _package("triton"),  # megatron-core imports it, with and without a GPU
        transformer_engine(version("transformer-engine"), engine_fault()),
        fp8(installed()),
        apex(package_folder("apex")),
        muon(version("emerging-optimizers")),
        _package("transformers", required="5.19.0"),
        _sglang(),
        *_machine(),
    ]


def apex(folder: Path | None) -> Finding:
    if folder is None:
        return Finding("apex", "ok", "not installed (not needed)")
    fault = apex_fault(folder)
    return Finding("apex", "bad" if fault else "ok", fault or f"NVIDIA's, {folder}")


def transformer_engine(core: str | None, fault: str | None) -> Finding:
    name = "transformer-engine"
    if core is None:
        return Finding(name, "note", "not installed: no FP8, no fused kernels")
    return Finding(name, "bad" if fault else "ok", fault or core)


def fp8(found: Installed) -> Finding:
    """Whether ``precision.fp8`` can be had from Transformer Engine here, in which recipes."""
    name, engine = "FP8", found.transformer_engine
    missing = None
    if not engine:
        missing = "Transformer Engine is not installed"
    elif found.engine_fault is not None:
        missing = "Transformer Engine does not work"
    elif engine < TE_NEEDED:
        missing = f"Transformer Engine {TE_NEEDED[0]}.{TE_NEEDED[1]} is needed"
    elif found.gpu is None:
        missing = "there is no GPU"
    if missing is not None or found.gpu is None:
        return Finding(name, "note", f"emulated only (precision.fp8.backend): {missing}")
    runs: list[str] = []
    lacking: list[str] = []
    for recipe, needs in NEEDS.items():
        fault = needs.fault(found.gpu)
        (lacking if fault else runs).append(f"{recipe} ({fault})" if fault else recipe)
    detail = f"{', '.join(runs) or 'emulated only'}; not {', '.join(lacking)}" * bool(lacking)
    return Finding(name, "ok" if runs else "note", detail or ", ".join(runs))


def muon(found: str | None) -> Finding:
    name = "emerging-optimizers"
    if found is None:
        return Finding(name, "ok", "not installed (optim.name=muon needs it)")
    fault = muon_fault(found)
    return Finding(name, "bad" if fault else "ok", fault or found)


def _python() -> Iterator[Finding]:
    from megarl import __version__

    yield Finding("megarl", "ok", f"{__version__}, {Path(__file__).resolve().parents[1]}")
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.machine()}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as e:  # OSError: a shared library is missing
        yield Finding("torch", "bad", f"cannot be imported: {e}")
        return
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("torch", "ok", f"{torch.__version__}, {built}")
    count = torch.cuda.device_count()
    if count:
        properties = torch.cuda.get_device_properties(0)
        size = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Finding("GPUs", "ok", f"{count} x {properties.name}, {size}")
        return
    asked = bool(torch.version.cuda) and Path("/dev/nvidiactl").exists()
    detail = (
        "none usable, although there is a driver" if asked else "none: training runs on CPU (gloo)"
    )
    yield Finding("GPUs", "note", detail)


def _native() -> Finding:
    name = "compiled operators"
    try:
        from megarl.ops import native_library

        path = native_library()
    except (ImportError, OSError) as e:
        return Finding(name, "bad", str(e))
    if path is None:
        return Finding(
            name, "note", "not built: torch references are used (pip install --no-deps -e .)"
        )
    return Finding(name, "ok", path.name)


def _package(name: str, required: str | None = None) -> Finding:
    found = version(name)
    if found is None:
        return Finding(name, "bad", f"not installed; {required or 'any version'} is needed")
    if required and found != required:
        return Finding(name, "note", f"{found}; tested with {required}")
    return Finding(name, "ok", found)


def _sglang() -> Finding:
    found = version("sglang")
    if found:
        return Finding("sglang", "ok", found)
    return Finding(
        "sglang", "note", "not in this environment (rollout.server_command may name another)"
    )


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Finding(
        "CPU cores", "ok", f"{cores} usable of {os.cpu_count()}, OMP_NUM_THREADS {threads}"
    )
    yield Finding("memory", "ok", _memory())
    for name, path in (("shared memory", Path("/dev/shm")), ("disk here", Path.cwd())):
        if path.is_dir():
            usage = shutil.disk_usage(path)
            state: State = "ok" if usage.free > 2**30 else "note"
            sizes = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
            yield Finding(name, state, sizes)


def _memory() -> str:
    """Of the machine, and the container's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{total / 2**30:.1f} GiB"
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return text
    return f"{text}, limited to {limit / 2**30:.1f} GiB here" if limit < total else text
