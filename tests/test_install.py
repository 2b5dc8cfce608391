"""What pip makes of the repository: the wheel of a machine with a compiler, and of one without."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("megarl", "csrc", "build_backend")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The sources alone, as a fresh clone has them."""
    for name in SOURCES:
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / "tree")
    return tmp_path / "tree"


def wheel(tree: Path, **env: str) -> tuple[subprocess.CompletedProcess[str], list[Path]]:
    """``pip wheel`` with the build tools of this environment."""
    out = tree.parent / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    settings = {k: v for k, v in os.environ.items() if k not in ("CXX", "MEGARL_OPS")}
    scripts = sysconfig.get_path("scripts")  # ninja
    settings["PATH"] = f"{scripts}:{settings['PATH']}"
    run = subprocess.run(
        [*command, "--wheel-dir", str(out), str(tree)],
        env={**settings, "MEGARL_CUDA": "0", **env},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return run, sorted(out.glob("*.whl"))


def names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as file:
        return file.namelist()


def imported(path: Path, into: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a packer and an op of the wheel."""
    with zipfile.ZipFile(path) as file:
        file.extractall(into)
    code = """
import torch
from megarl import ops
assert ops.pack_rows([3, 4, 5], row_tokens=8, dp=2).lengths == [7]
assert ops.segment_sum(torch.ones(3), torch.tensor([0, 3])).tolist() == [3]
print(sorted({kind for kinds in ops.call_counts().values() for kind in kinds}))
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=into,
        env={k: v for k, v in os.environ.items() if k != "MEGARL_OPS"} | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_with_a_compiler_the_wheel_is_of_this_python_and_compiled(tree: Path) -> None:
    run, found = wheel(tree)
    assert run.returncode == 0, run.stderr
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert len(found) == 1 and f"-{tag}-{tag}-linux_" in found[0].name
    inside = names(found[0])
    assert "megarl/_C.abi3.so" in inside
    assert f"megarl/_host{sysconfig.get_config_var('EXT_SUFFIX')}" in inside
    ran = imported(found[0], tree.parent / "there", MEGARL_OPS="native")
    assert (ran.returncode, ran.stdout) == (0, "['native']\n"), ran.stderr
    library = (tree.parent / "there" / "megarl" / "_C.abi3.so").read_bytes()
    assert b"libpython" not in library and b"PyObject" not in library


def test_without_a_compiler_the_installation_says_so_and_the_references_run(tree: Path) -> None:
    run, found = wheel(tree, CXX="/nonexistent/c++")
    assert run.returncode == 0, run.stderr
    assert "no C++ compiler was found (/nonexistent/c++)" in run.stderr
    assert "install g++ 9 or newer" in run.stderr
    assert len(found) == 1 and found[0].name.endswith("-py3-none-any.whl")
    assert not [name for name in names(found[0]) if name.endswith(".so")]
    ran = imported(found[0], tree.parent / "there")
    assert (ran.returncode, ran.stdout) == (0, "['torch']\n"), ran.stderr
    assert ran.stderr.count("it was not built, for which a C++ compiler is needed") == 1


def test_where_the_compiled_operators_are_required_a_missing_compiler_is_an_error(
    tree: Path,
) -> None:
    run, found = wheel(tree, CXX="/nonexistent/c++", MEGARL_OPS="native")
    assert run.returncode != 0 and not found
    assert "MEGARL_OPS=native, but no C++ compiler was found" in run.stdout + run.stderr
