"""The optional packages that Megatron-core uses where it finds them, looked at without importing
them: a broken one of them breaks whoever imports it.

``faults`` says which of them would make Megatron fail, or compute with the wrong package, and what
to do about it; ``explain`` says it of an import that did fail, ``import_fault`` by trying one.
"""

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from megarl.errors import InstallError

TE = "transformer-engine"
_TE_TORCH = "transformer-engine-torch"
_TE_CUDA = "transformer-engine-cu"  # and CUDA's major version: its kernels
TE_NEEDED = (2, 20)  # by layers that are made of it: the version that tests make them of
_MUON = "emerging-optimizers"
_MUON_VERSION = (0, 2)  # Megatron-core 0.19 looks at older ones as if they were absent


@dataclass(frozen=True)
class Gpu:
    """The least able of this machine's. ``cuda``: that torch is built for.

    Example: ``Gpu(capability=(9, 0), cuda=(13, 0))``
    """

    capability: tuple[int, int]
    cuda: tuple[int, int]


@dataclass(frozen=True)
class Installed:
    """What of it is usable. ``transformer_engine``: (major, minor) of its version, () without.

    Example: ``Installed(transformer_engine=(2, 20), apex=False, fused_wgrad=False, deep_ep=True,
    hybrid_ep=False, muon=False)``
    """

    transformer_engine: tuple[int, ...]
    apex: bool  # NVIDIA's
    fused_wgrad: bool  # apex's kernel for local linear layers
    deep_ep: bool
    hybrid_ep: bool
    muon: bool
    engine_fault: str | None = None  # why Transformer Engine does not work, as far as files tell
    engine_switches: Mapping[str, str] = field(default_factory=dict)  # environment variables of it
    gpu: Gpu | None = None

    @property
    def adam(self) -> str:
        """The implementation that Megatron takes."""
        if self.transformer_engine:
            return "Transformer Engine's FusedAdam"
        return "apex's FusedAdam" if self.apex else "torch's AdamW"


def installed() -> Installed:
    deep_ep = package_folder("deep_ep")
    apex = package_folder("apex")
    return Installed(
        transformer_engine=_numbers(TE),
        apex=apex is not None and apex_fault(apex) is None,
        fused_wgrad=_found("fused_weight_gradient_mlp_cuda"),
        deep_ep=deep_ep is not None,
        hybrid_ep=deep_ep is not None and any(deep_ep.glob("hybrid_ep*")),
        muon=_numbers(_MUON) >= _MUON_VERSION and muon_fault(version(_MUON)) is None,
        engine_fault=engine_fault(),
        engine_switches={k: v for k, v in os.environ.items() if k.startswith("NVTE_")},
        gpu=gpu(),
    )


def gpu() -> Gpu | None:
    import torch

    cuda = _pair(torch.version.cuda or "")
    if cuda is None or not torch.cuda.is_available():
        return None
    devices = range(torch.cuda.device_count())
    return Gpu(min(torch.cuda.get_device_capability(i) for i in devices), cuda)


def faults() -> list[str]:
    """Of packages on the path, one sentence each with what to run."""
    apex = package_folder("apex")
    found = (
        None if apex is None else apex_fault(apex),
        engine_fault(),
        muon_fault(version(_MUON)),
    )
    return [fault for fault in found if fault is not None]


def require_sound() -> None:
    """Raise InstallError with every fault."""
    if found := faults():
        raise InstallError("\n".join(found))


def apex_fault(folder: Path) -> str | None:
    """NVIDIA's apex holds optimizers/; the project of that name on PyPI is a web toolkit."""
    if (folder / "optimizers").is_dir():
        return None
    detail = f"{folder} is PyPI's apex, another project: megatron-core takes it for NVIDIA's. "
    return detail + "Run: pip uninstall apex"


def engine_fault() -> str | None:
    """Of the Transformer Engine on the path. Megatron cannot be imported with some of these, and
    computes without it, in silence, with others.
    """
    import torch

    folder = package_folder("transformer_engine")
    kernels = {n: v for n in ("12", "13", "14") if (v := version(_TE_CUDA + n)) is not None}
    built_in = folder is not None and has_torch_part(folder)
    return transformer_engine_fault(
        version(TE), version(_TE_TORCH), kernels, torch.version.cuda, built_in=built_in
    )


def has_torch_part(folder: Path) -> bool:
    """A Transformer Engine that was built from its sources is one distribution: the library for
    torch lies in the package or beside it.
    """
    places = (folder, folder.parent, folder / "wheel_lib")
    return any(any(place.glob("transformer_engine_torch*.so")) for place in places)


def transformer_engine_fault(
    core: str | None,
    torch_part: str | None,
    kernels: Mapping[str, str] | None = None,
    cuda: str | None = None,
    *,
    built_in: bool = False,
) -> str | None:
    """``core``, ``torch_part``: versions of the distributions, None where absent. ``kernels``: by
    the major version of CUDA that they are for, the version. ``cuda``: torch's. ``built_in``: the
    torch part is inside the core's package.
    """
    if core is None or built_in:
        return None
    wanted = f"Install {TE}[pytorch]=={core}, or run: pip uninstall {TE}"
    if torch_part is None:
        return f"{TE} {core} without {_TE_TORCH}: megatron-core cannot be imported. {wanted}"
    if torch_part != core:
        return f"{TE} {core} with {_TE_TORCH} {torch_part}: they must be equal. {wanted}"
    for major, found in (kernels or {}).items():
        if found != core:
            return f"{TE} {core} with {_TE_CUDA}{major} {found}: they must be equal. {wanted}"
    torch_cuda = (cuda or "").partition(".")[0]
    if kernels and torch_cuda and torch_cuda not in kernels:
        names = ", ".join(_TE_CUDA + major for major in kernels)
        return (
            f"{names} is for another CUDA than torch, which is built for {cuda}. "
            f"Install {TE}[core-cu{torch_cuda},pytorch]=={core}, or run: pip uninstall {TE}"
        )
    return None


def muon_fault(found: str | None) -> str | None:
    """It is written for Python 3.12, and Megatron imports it wherever it is installed."""
    if found is None or sys.version_info >= (3, 12):
        return None
    return (
        f"{_MUON} {found} needs Python 3.12, this is {sys.version_info[0]}.{sys.version_info[1]}: "
        f"megatron-core cannot be imported. Run: pip uninstall {_MUON}"
    )


def explain(error: BaseException) -> InstallError | None:
    """Which optional package an import of Megatron failed in; None where it was in none."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    for name, package in (("transformer_engine", TE), ("apex", "apex"), ("deep_ep", "deep_ep")):
        if any(f"/{name}/" in file for file in frames):
            return InstallError(
                f"{package} is installed and cannot be imported ({type(error).__name__}: {error}), "
                "so megatron-core cannot either. Install it for this torch and CUDA, or run: "
                f"pip uninstall {package}"
            )
    return None


@functools.cache
def import_fault() -> str | None:
    """The first error that importing Transformer Engine and its part for torch raises, None where
    both load. Alone here it imports.

    ``import transformer_engine`` succeeds where that part does not load (another torch, another
    CUDA, a damaged file), and Megatron takes an ImportError on the way for absence; asking for the
    part by itself tells why.
    """
    try:
        for name in ("transformer_engine.common", "transformer_engine.pytorch"):
            importlib.import_module(name)
    except Exception as e:  # whatever a damaged installation raises
        return f"{type(e).__name__}: {e}"
    return None


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else Path(spec.origin or name)


def _numbers(distribution: str) -> tuple[int, ...]:
    found = version(distribution)
    parts = [] if found is None else found.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def _pair(text: str) -> tuple[int, int] | None:
    parts = text.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 else None


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
