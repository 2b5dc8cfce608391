"""Compiles csrc/ by calling the compilers directly, several files at a time.

For libraries other than the installed one: on a GPU machine without the package
(tools/verify_gpu.py), with a sanitizer or for one instruction set (tests/ops/). As a command it
checks that the CUDA kernels compile, which needs no GPU:

    python tools/native_build.py check-cuda [--nvcc nvcc]

torch's stable ABI needs no CUDA headers of torch's own, so the kernels compile against a CPU build
of torch as well.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "build_backend"))

from native_flags import CUDA_ARCHS, CXX_FLAGS, HOST_FLAGS, NVCC_FLAGS, TORCH_TARGET_VERSION

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
Command = list[str]
_FILE_LIMIT_S = 600.0


class BuildError(RuntimeError):
    """A compiler failed; the message is what it said."""


@dataclass(frozen=True)
class Compilers:
    """``jobs``: how many run at a time."""

    cxx: str = os.environ.get("CXX") or ("g++" if shutil.which("g++") else "c++")
    nvcc: str = "nvcc"
    jobs: int = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))


DEFAULT = Compilers()


def cpu_sources() -> list[Path]:
    return sorted([*CSRC.glob("*.cpp"), *CSRC.glob("cpu/*.cpp")])


def cuda_sources() -> list[Path]:
    return sorted(CSRC.glob("cuda/*.cu"))


def host_sources() -> list[Path]:
    return sorted(CSRC.glob("host/*.cpp"))


def build_library(
    out: Path,
    *,
    flags: Sequence[str] = (),
    cuda_arch: str | None = None,
    compilers: Compilers = DEFAULT,
) -> Path:
    """The library of operators at ``out``. ``flags``: added to the C++ compiler's and linker's;
    ``cuda_arch``: with the CUDA kernels, for this compute capability ("9.0").
    """
    commands: dict[Path, Command] = {}
    for source in cpu_sources():
        target = _object_of(source, out)
        commands[target] = [*shlex.split(compilers.cxx), *CXX_FLAGS, *_torch_flags(), *flags]
        commands[target] += ["-fPIC", "-c", str(source), "-o", str(target)]
    libraries = ["c10", "torch", "torch_cpu"]
    linker = [*shlex.split(compilers.cxx), *flags]
    if cuda_arch is not None:
        for source in cuda_sources():
            target = _object_of(source, out)
            commands[target] = cuda_command(source, target, cuda_arch, compilers.nvcc)
        linker = [compilers.nvcc]  # it knows where its runtime library is
        # A CPU build of torch has neither; the library is then linked, but does not load.
        for name in ("c10_cuda", "torch_cuda"):
            libraries += [name] * (_torch_lib() / f"lib{name}.so").exists()
    run_all(commands.values(), compilers.jobs)
    link = [*linker, "-shared", *map(str, commands), f"-L{_torch_lib()}"]
    run_all([[*link, *(f"-l{name}" for name in libraries), "-o", str(out)]], 1)
    return out


def build_host_module(
    out: Path, *, flags: Sequence[str] = (), compilers: Compilers = DEFAULT
) -> Path:
    """The Python module of csrc/host/ at ``out``."""
    import sysconfig

    import pybind11

    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    compiler = [*shlex.split(compilers.cxx), *HOST_FLAGS, *includes, *flags, "-fPIC"]
    objects = {_object_of(source, out): source for source in host_sources()}
    run_all(
        ([*compiler, "-c", str(source), "-o", str(target)] for target, source in objects.items()),
        compilers.jobs,
    )
    link = [*shlex.split(compilers.cxx), *flags, "-shared", *map(str, objects), "-o", str(out)]
    run_all([link], 1)
    return out


def cuda_command(source: Path, target: Path, arch: str, nvcc: str = "nvcc") -> Command:
    """Compile one CUDA file for one compute capability."""
    sm = arch.replace(".", "")
    command = [nvcc, *NVCC_FLAGS, "-DUSE_CUDA", *_torch_flags(), "-Xcompiler", "-fPIC"]
    command += ["-gencode", f"arch=compute_{sm},code=sm_{sm}", "--Werror", "all-warnings"]
    return [*command, "-c", str(source), "-o", str(target)]


def run_all(commands: Iterable[Command], jobs: int) -> None:
    """Raises BuildError for the first that fails."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_run, command) for command in commands]
        try:
            for one in waiting:
                one.result()
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise


def _run(command: Command) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_FILE_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BuildError(f"{command[0]}: {e}") from e
    if done.returncode != 0:
        output = f"{done.stdout}{done.stderr}"[-8000:]
        raise BuildError(f"{shlex.join(command)}\nended with code {done.returncode}:\n{output}")


def _object_of(source: Path, out: Path) -> Path:
    """Beside ``out``, under a name that no other source and no other library has."""
    folder = out.with_suffix(".objects")
    folder.mkdir(exist_ok=True)
    return folder / (str(source.relative_to(CSRC)).replace("/", "-") + ".o")


def _torch_flags() -> list[str]:
    include = _torch_lib().parent / "include"
    return [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", "-isystem", str(include)]


def _torch_lib() -> Path:
    """Found without importing torch, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"{sys.executable} has no torch")
    return Path(spec.origin).parent / "lib"


def check_cuda(nvcc: str) -> None:
    """Compile every CUDA file for every architecture and keep nothing."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            cuda_command(source, Path(folder) / f"{source.stem}-{arch}.o", arch, nvcc)
            for source in cuda_sources()
            for arch in CUDA_ARCHS
        ]
        run_all(commands, DEFAULT.jobs)
    for source in cuda_sources():
        print(f"{source.relative_to(ROOT)}: compiles for compute capability", *CUDA_ARCHS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["check-cuda"])
    parser.add_argument("--nvcc", default=DEFAULT.nvcc, help="the CUDA compiler")
    try:
        check_cuda(parser.parse_args().nvcc)
    except BuildError as e:
        sys.exit(f"check-cuda: {e}")


if __name__ == "__main__":
    main()
