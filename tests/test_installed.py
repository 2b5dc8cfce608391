"""Packages that break Megatron, or that it takes for others: found before it is imported.

Each fault is put on the path of a process of its own, as pip would leave it there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.installed import (
    Installed,
    explain,
    faults,
    installed,
    muon_fault,
    transformer_engine_fault,
)

MODULES: dict[str, tuple[str, str, str]] = {  # name -> (distribution, version, source)
    "apex": ("apex", "0.9.10.dev0", "def main(global_config, **settings): ..."),
    "te_core": ("transformer_engine", "2.20.2", ""),
    "te_broken": (
        *("transformer_engine", "2.20.2"),
        "raise RuntimeError('Found empty `transformer-engine` meta package installed.')",
    ),
    "te_files": (
        *("transformer_engine", "2.20.2"),
        "raise FileNotFoundError('Could not find shared object file: transformer_engine_torch')",
    ),
    "te_torch": ("transformer_engine_torch", "2.20.2", ""),
    "te_torch_older": ("transformer_engine_torch", "2.19.0", ""),
    "te_cu12": ("transformer_engine_cu12", "2.20.2", ""),
    "te_cu13_older": ("transformer_engine_cu13", "2.19.0", ""),
    "muon": ("emerging_optimizers", "0.3.0", ""),
}


def install(folder: Path, *names: str) -> None:
    for name in names:
        distribution, version, source = MODULES[name]
        (folder / distribution).mkdir(exist_ok=True)
        (folder / distribution / "__init__.py").write_text(source + "\n")
        about = folder / f"{distribution}-{version}.dist-info"
        about.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (about / "METADATA").write_text(text)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        **{"capture_output": True, "text": True, "timeout": 120},
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


CONFIG = """
run: {dir: DIR/run, steps: 1, mode: sft}
model: {hf: DIR}
optim: {lr: 1}
algo: {policy: {name: sft}}
data: {demonstrations: DIR/d}
"""


def test_a_run_says_all_of_it_before_it_starts(tmp_path: Path) -> None:
    """Two of one kind, and one more where Python is too old for it."""
    packages = tmp_path / "packages"
    packages.mkdir()
    install(packages, "apex", "te_core", "muon")
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.replace("DIR", str(tmp_path)))
    ended = run(packages, "-m", "megarl.train", str(config))
    assert ended.returncode == 2
    assert "pip uninstall apex" in ended.stderr and str(packages / "apex") in ended.stderr
    assert "pip uninstall transformer-engine" in ended.stderr
    assert "Install transformer-engine[pytorch]==2.20.2" in ended.stderr
    old = sys.version_info < (3, 12)
    assert ("pip uninstall emerging-optimizers" in ended.stderr) == old
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken, words",
    [
        ("te_broken", "RuntimeError: Found empty"),
        ("te_files", "FileNotFoundError: Could not find"),
    ],
)
def test_what_fails_only_when_it_is_imported_is_named(
    tmp_path: Path, broken: str, words: str
) -> None:
    """Where there are GPUs. Elsewhere Megatron does not see it, and its fault does no harm."""
    install(tmp_path, broken, "te_torch")
    assert run(tmp_path, "-c", "import megarl.actor").returncode == 0
    with_gpus = "import torch; torch.cuda.is_available = lambda: True; import megarl.actor"
    ended = run(tmp_path, "-c", with_gpus)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("megarl.errors.InstallError: transformer-engine is installed and cannot")
    assert words in last and "pip uninstall transformer-engine" in last


@pytest.mark.parametrize("names", [(), ("te_core", "te_torch")])
def test_what_is_whole_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    install(tmp_path, *names)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert faults() == []
    assert installed().transformer_engine == ((2, 20) if names else ())


@pytest.mark.parametrize(
    "names, words",
    [
        (["te_core"], "2.20.2 without transformer-engine-torch"),
        (["te_core", "te_torch_older"], "with transformer-engine-torch 2.19.0: they must be equal"),
        (
            ["te_core", "te_torch", "te_cu13_older"],
            "with transformer-engine-cu13 2.19.0: they must",
        ),
        (["te_core", "te_torch", "te_cu12", "te_cu13_older"], "transformer-engine-cu13 2.19.0"),
    ],
)
def test_parts_that_do_not_belong_together_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], words: str
) -> None:
    install(tmp_path, *names)
    monkeypatch.syspath_prepend(str(tmp_path))
    (fault,) = faults()
    assert words in fault and "pip uninstall transformer-engine" in fault
    assert installed().engine_fault == fault


@pytest.mark.parametrize(
    "kernels, cuda, words",
    [
        (["12"], "13.0", "transformer-engine-cu12 is for another CUDA than torch, which is built"),
        (["13"], "12.9", "Install transformer-engine[core-cu12,pytorch]==2.20.2"),
        (["13", "14"], "12.8", "transformer-engine-cu13, transformer-engine-cu14 is for another"),
        (["12", "13"], "13.0", None),
        (["12"], "12.4", None),
        ([], "13.0", None),  # in the same distribution
        (["13"], None, None),  # torch for CPUs: there is no GPU to compute on either
    ],
)
def test_kernels_for_another_cuda_than_torchs_are_a_fault(
    kernels: list[str], cuda: str | None, words: str | None
) -> None:
    parts = dict.fromkeys(kernels, "2.20.2")
    fault = transformer_engine_fault("2.20.2", "2.20.2", parts, cuda)
    assert (fault is None) == (words is None)
    assert words is None or words in str(fault)


@pytest.mark.parametrize("place", ["transformer_engine", ".", "transformer_engine/wheel_lib"])
def test_one_built_from_its_sources_has_its_torch_part_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    install(tmp_path, "te_core")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(faults()) == 1
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()
    assert faults() == []


# Like the real one's: what its part for torch raises is swallowed where it is an ImportError.
SWALLOWS = """
try:
    from . import pytorch
except ImportError:
    pass
"""
LOADS = """
import importlib.util
from pathlib import Path

def load_framework_extension(framework):
    path = next(Path(__file__).parents[2].glob(f"transformer_engine_{framework}*.so"))
    spec = importlib.util.spec_from_file_location(f"transformer_engine_{framework}", path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


def test_a_torch_part_that_does_not_load_is_found_though_its_package_imports(
    tmp_path: Path,
) -> None:
    """A damaged library, or one for another torch, is an ImportError, which upstream takes for
    absence.
    """
    install(tmp_path, "te_core", "te_torch")
    package = tmp_path / "transformer_engine"
    (package / "__init__.py").write_text(SWALLOWS)
    for name, source in (("common", LOADS), ("pytorch", "")):
        (package / name).mkdir()
        (package / name / "__init__.py").write_text(source)
    loads = (
        "from transformer_engine.common import load_framework_extension as load\nload('torch')\n"
    )
    (package / "pytorch" / "__init__.py").write_text(loads)
    (tmp_path / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").write_bytes(b"ELF")
    assert run(tmp_path, "-c", "import transformer_engine").returncode == 0
    asked = "from megarl.installed import import_fault; print(import_fault())"
    ended = run(tmp_path, "-c", asked)
    assert ended.stdout.startswith("ImportError: ") and "file too short" in ended.stdout


@pytest.mark.parametrize(
    "names, words",
    [
        ([], "ModuleNotFoundError: No module named 'transformer_engine'"),
        (["te_broken"], "RuntimeError: Found empty"),
        (["te_files"], "FileNotFoundError: Could not find shared object"),
        (["te_core"], "ModuleNotFoundError: No module named 'transformer_engine.common'"),
    ],
)
def test_the_reason_of_a_failing_import_is_told(
    tmp_path: Path, names: list[str], words: str
) -> None:
    install(tmp_path, *names)
    asked = "from megarl.installed import import_fault; print(import_fault())"
    assert run(tmp_path, "-c", asked).stdout.startswith(words)


def test_nvidias_apex_is_told_by_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "apex")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not installed().apex and len(faults()) == 1
    (tmp_path / "apex" / "optimizers").mkdir()
    assert installed().apex and faults() == []


def test_the_adam_in_use_is_the_first_that_is_there() -> None:
    def found(te: tuple[int, ...], apex: bool) -> str:
        return Installed(te, apex, *[False] * 4).adam

    assert found((2, 20), True) == found((2, 20), False) == "Transformer Engine's FusedAdam"
    assert (found((), True), found((), False)) == ("apex's FusedAdam", "torch's AdamW")


def test_an_error_of_something_else_is_not_explained() -> None:
    try:
        raise RuntimeError("elsewhere")
    except RuntimeError as e:
        assert explain(e) is None
    assert muon_fault(None) is None
