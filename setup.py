"""The compiled part of the package: megarl/_C.abi3.so from csrc/. All else is in pyproject.toml.

MEGARL_CUDA=auto  CUDA kernels if torch is a CUDA build and nvcc is found (the default)
MEGARL_CUDA=1     CUDA kernels, or an error that says what is missing
MEGARL_CUDA=0     CPU kernels only
MAX_JOBS          compilers run at a time (default: the cores this process may use)
"""

import os
import sys
from glob import glob
from typing import Any

from setuptools import setup

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "build_backend"))
from native_flags import CUDA_ARCHS, CXX_FLAGS, NVCC_FLAGS, TORCH_TARGET_VERSION


def native_extension() -> dict[str, Any]:
    """setup() arguments that build megarl._C."""
    import torch
    from torch.utils import cpp_extension

    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    sources = sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp"))
    macros: list[tuple[str, str | None]] = [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)]
    flags = {"cxx": CXX_FLAGS}
    extension = cpp_extension.CppExtension
    if wants_cuda(torch.version.cuda, cpp_extension.CUDA_HOME):
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ";".join(CUDA_ARCHS))
        sources += sorted(glob("csrc/cuda/*.cu"))
        macros.append(("USE_CUDA", None))
        flags["nvcc"] = NVCC_FLAGS
        extension = cpp_extension.CUDAExtension
    module = extension(
        "megarl._C",
        sources,
        depends=glob("csrc/**/*.h", recursive=True) + glob("csrc/cuda/*.cuh"),
        include_dirs=[os.path.abspath("csrc")],
        define_macros=macros,
        extra_compile_args=flags,
        py_limited_api=True,  # no libpython inside: one library for every Python
    )
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=True)},
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


def wants_cuda(torch_cuda: str | None, cuda_home: str | None) -> bool:
    choice = os.environ.get("MEGARL_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"MEGARL_CUDA={choice!r} is not one of auto, 0, 1")
    if choice == "1" and not (torch_cuda and cuda_home):
        missing = "nvcc (set CUDA_HOME)" if torch_cuda else "a CUDA build of torch"
        raise SystemExit(f"MEGARL_CUDA=1, but there is no {missing}")
    return choice != "0" and bool(torch_cuda and cuda_home)


# Set by build_backend/ where only names and dependencies are asked for, which works without torch.
setup(**({} if os.environ.get("MEGARL_METADATA_ONLY") else native_extension()))
