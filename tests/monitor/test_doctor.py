"""megarl doctor: what it makes of broken installations."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.installed import Gpu, Installed, transformer_engine_fault
from megarl.monitor.doctor import apex, examine, fp8, transformer_engine


def test_the_apex_of_pypi_is_told_from_nvidias(tmp_path: Path) -> None:
    assert apex(None).state == "ok"
    found = apex(tmp_path)
    assert found.state == "bad" and "pip uninstall apex" in found.detail
    (tmp_path / "optimizers").mkdir()
    assert apex(tmp_path).state == "ok"


def test_half_a_transformer_engine_is_reported() -> None:
    assert transformer_engine(None, None).state == "note"
    assert transformer_engine("2.20.2", None).state == "ok"
    fault = transformer_engine_fault("2.20.2", None)
    found = transformer_engine("2.20.2", fault)
    assert found.state == "bad" and "transformer-engine-torch" in found.detail


PLAIN = Installed((), *[False] * 5)
H100 = Gpu((9, 0), (13, 0))


@pytest.mark.parametrize(
    "found, state, words",
    [
        (PLAIN, "note", "emulated only (precision.fp8.backend): Transformer Engine is not"),
        (replace(PLAIN, transformer_engine=(2, 20), engine_fault="x"), "note", "does not work"),
        (replace(PLAIN, transformer_engine=(2, 20)), "note", "there is no GPU"),
        (replace(PLAIN, transformer_engine=(2, 20), gpu=H100), "ok",
         "tensorwise, delayed, blockwise; not mxfp8 (the GPUs here have compute capability 9.0)"),
        (replace(PLAIN, transformer_engine=(2, 20), gpu=Gpu((10, 0), (13, 0))), "ok",
         "tensorwise, delayed, blockwise, mxfp8"),
        (replace(PLAIN, transformer_engine=(2, 1), gpu=H100), "note", "2.20 is needed"),
        (replace(PLAIN, transformer_engine=(2, 20), gpu=Gpu((8, 0), (13, 0))), "note",
         "emulated only; not tensorwise (the GPUs here have compute capability 8.0), delayed"),
    ],
)  # fmt: skip
def test_it_is_said_which_fp8_recipes_run_here(found: Installed, state: str, words: str) -> None:
    finding = fp8(found)
    assert finding.state == state and words in finding.detail


def test_everything_is_looked_at_and_fits_one_screen() -> None:
    findings = examine()
    names = {f.name for f in findings}
    assert {"torch", "GPUs", "megatron-core", "compiled operators", "transformer-engine", "FP8",
            "apex", "CPU cores", "memory"} <= names  # fmt: skip
    assert len(findings) <= 20 and all("\n" not in f.detail for f in findings)
