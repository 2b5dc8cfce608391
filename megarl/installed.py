"""The optional packages that Megatron-core uses where it finds them, looked at without importing
them: a broken one of them breaks whoever imports it.

``faults`` says which of them would make Megatron fail, or compute with the wrong package, and what
to do about it; ``explain`` says it of an import that did fail.
"""

import importlib.util
import sys
import traceback
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from megarl.errors import InstallError

TE = "transformer-engine"
TE_NEEDED = (2, 20)  # by layers that are made of it: the version that tests make them of
_MUON = "emerging-optimizers"
_MUON_VERSION = (0, 2)  # Megatron-core 0.19 looks at older ones as if they were absent


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
    )


def faults() -> list[str]:
    """Of packages on the path, one sentence each with what to run."""
    apex = package_folder("apex")
    found = (
        None if apex is None else apex_fault(apex),
        transformer_engine_fault(version(TE), version("transformer-engine-torch")),
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


def transformer_engine_fault(core: str | None, torch_part: str | None) -> str | None:
    """Half of it (the core without its torch part) makes ``import megatron.core`` fail."""
    if core is None or torch_part is not None:
        return None
    return (
        f"{TE} {core} without transformer-engine-torch: megatron-core cannot be imported. "
        f"Install transformer-engine[pytorch]=={core}, or run: pip uninstall {TE}"
    )


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


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
