"""``megarl doctor``: what this machine has, and what would go wrong with it. Starts nothing.

Megatron-core, Transformer Engine and apex are looked at on disk, not imported: a broken one of them
breaks its importer, and finding that out is the point.
"""

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

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
        transformer_engine(_version("transformer-engine"), _version("transformer-engine-torch")),
        apex(_package_folder("apex")),
        _package("transformers", required="5.19.0"),
        _sglang(),
        *_machine(),
    ]


def apex(folder: Path | None) -> Finding:
    """NVIDIA's apex holds optimizers/; the project of that name on PyPI is a web toolkit."""
    if folder is None:
        return Finding("apex", "ok", "not installed (not needed)")
    if (folder / "optimizers").is_dir():
        return Finding("apex", "ok", f"NVIDIA's, {folder}")
    detail = f"{folder} is PyPI's apex, another project: megatron-core takes it for NVIDIA's. "
    return Finding("apex", "bad", detail + "Run: pip uninstall apex")


def transformer_engine(version: str | None, torch_part: str | None) -> Finding:
    """Half of it (the core without its torch part) makes ``import megatron.core`` fail."""
    name = "transformer-engine"
    if version is None:
        return Finding(name, "note", "not installed: no FP8, no fused kernels")
    if torch_part is None:
        detail = f"{version} without transformer-engine-torch: megatron-core cannot be imported. "
        detail += "Install transformer-engine[pytorch], or uninstall it"
        return Finding(name, "bad", detail)
    return Finding(name, "ok", f"{version}, torch part {torch_part}")


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
    version = _version(name)
    if version is None:
        return Finding(name, "bad", f"not installed; {required or 'any version'} is needed")
    if required and version != required:
        return Finding(name, "note", f"{version}; tested with {required}")
    return Finding(name, "ok", version)


def _sglang() -> Finding:
    version = _version("sglang")
    if version:
        return Finding("sglang", "ok", version)
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


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else Path(spec.origin or name)
