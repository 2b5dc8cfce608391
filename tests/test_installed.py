"""Packages that break Megatron, or that it takes for others: found before it is imported.

Each fault is put on the path of a process of its own, as pip would leave it there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.installed import Installed, explain, faults, installed, muon_fault

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
    install(tmp_path, broken, "te_torch")
    ended = run(tmp_path, "-c", "import megarl.actor")
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
