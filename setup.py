"""The compiled parts of the package; all else is in pyproject.toml.

megarl/_C.abi3.so   operators on tensors, from csrc/: torch's stable ABI, no Python inside
megarl/_host.*.so   packing and codecs on the host, from csrc/host/: pybind11, one for each Python

Without a C++ compiler (CXX, or else c++ or g++) both are left out, and the installation says so:
every operator then runs its slower reference.

MEGARL_CUDA=auto  CUDA kernels if torch is a CUDA build and nvcc is found (the default)
MEGARL_CUDA=1     CUDA kernels, or an error that says what is missing
MEGARL_CUDA=0     CPU kernels only
MEGARL_OPS=native a missing compiler is an error
MAX_JOBS          compilers run at a time (default: the cores this process may use)
"""

import os
import shlex
import shutil
import sys
from glob import glob
from typing import Any

from setuptools import Extension, setup

# The oldest torch whose stable ABI the library uses (2.10), as torch/csrc/stable wants it spelt.
TORCH_TARGET_VERSION = "0x020a000000000000"
# No contraction of a multiplication and an addition into one rounding: the versions of a loop for
# AVX-512, AVX2 and the baseline, and the CUDA kernels, do one arithmetic (csrc/cpu/simd.h). The
# other two let loops with branches become vector instructions; no value depends on them.
CXX_FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-g0", "-Wall"]
CXX_FLAGS += ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
HOST_FLAGS = ["-O3", "-std=c++17", "-fvisibility=hidden", "-g0", "-Wall"]
NVCC_FLAGS = ["-O3", "-std=c++17", "--fmad=false"]
# Hopper and Blackwell; used where the build machine has no GPU to ask.
CUDA_ARCHS = "9.0;10.0"
LOST = (
    "It is installed without its compiled operators: each runs its torch or Python reference, "
    "which gives the same values and is slower."
)
REMEDY = (
    "To have them, install g++ 9 or newer (Debian, Ubuntu: apt-get install g++), or name a "
    "compiler in CXX, and repeat the installation"
)


def native_extensions() -> dict[str, Any]:
    """setup() arguments that build megarl._C and megarl._host; none where nothing can compile."""
    given = shlex.split(os.environ.get("CXX", ""))[:1]
    compiler = next((name for name in given or ("c++", "g++") if shutil.which(name)), None)
    if compiler is None:
        reason = f"no C++ compiler was found ({given[0] if given else 'neither c++ nor g++'})"
        if os.environ.get("MEGARL_OPS") == "native":
            raise SystemExit(f"MEGARL_OPS=native, but {reason}. {REMEDY}")
        warning = f"megarl: warning: {reason}. {LOST} {REMEDY}"
        print(warning, file=sys.stderr)
        os.environ["MEGARL_NOT_COMPILED"] = warning  # for build_backend/
        return {}
    os.environ.setdefault("CXX", compiler)
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    from torch.utils import cpp_extension

    return {
        "ext_modules": [tensor_extension(), host_extension()],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=True)},
    }


def host_extension() -> Extension:
    import pybind11

    return Extension(
        "megarl._host",
        sorted(glob("csrc/host/*.cpp")),
        depends=glob("csrc/host/*.h"),
        include_dirs=[pybind11.get_include()],
        extra_compile_args={"cxx": HOST_FLAGS},
        language="c++",
    )


def tensor_extension() -> Extension:
    import torch
    from torch.utils import cpp_extension

    sources = sorted(glob("csrc/*.cpp") + glob("csrc/cpu/*.cpp"))
    macros: list[tuple[str, str | None]] = [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)]
    flags = {"cxx": CXX_FLAGS}
    extension = cpp_extension.CppExtension
    if wants_cuda(torch.version.cuda, cpp_extension.CUDA_HOME):
        if not torch.cuda.is_available():
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHS)
        sources += sorted(glob("csrc/cuda/*.cu"))
        macros.append(("USE_CUDA", None))
        flags["nvcc"] = NVCC_FLAGS
        extension = cpp_extension.CUDAExtension
    return extension(
        "megarl._C",
        sources,
        depends=glob("csrc/**/*.h", recursive=True),
        include_dirs=[os.path.abspath("csrc")],
        define_macros=macros,
        extra_compile_args=flags,
        py_limited_api=True,  # no libpython inside: one library for every Python
    )


def wants_cuda(torch_cuda: str | None, cuda_home: str | None) -> bool:
    choice = os.environ.get("MEGARL_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise SystemExit(f"MEGARL_CUDA={choice!r} is not one of auto, 0, 1")
    if choice == "1" and not (torch_cuda and cuda_home):
        missing = "nvcc (set CUDA_HOME)" if torch_cuda else "a CUDA build of torch"
        raise SystemExit(f"MEGARL_CUDA=1, but there is no {missing}")
    return choice != "0" and bool(torch_cuda and cuda_home)


# Set by build_backend/ where only names and dependencies are asked for, which works without torch.
setup(**({} if os.environ.get("MEGARL_METADATA_ONLY") else native_extensions()))
