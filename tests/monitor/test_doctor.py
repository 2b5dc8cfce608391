"""megarl doctor: what it makes of broken installations."""

from pathlib import Path

from megarl.monitor.doctor import apex, examine, transformer_engine


def test_the_apex_of_pypi_is_told_from_nvidias(tmp_path: Path) -> None:
    assert apex(None).state == "ok"
    found = apex(tmp_path)
    assert found.state == "bad" and "pip uninstall apex" in found.detail
    (tmp_path / "optimizers").mkdir()
    assert apex(tmp_path).state == "ok"


def test_half_a_transformer_engine_is_reported() -> None:
    assert transformer_engine(None, None).state == "note"
    assert transformer_engine("2.20.2", "2.20.2").state == "ok"
    found = transformer_engine("2.20.2", None)
    assert found.state == "bad" and "transformer-engine-torch" in found.detail


def test_everything_is_looked_at_and_fits_one_screen() -> None:
    findings = examine()
    names = {f.name for f in findings}
    assert {"torch", "GPUs", "megatron-core", "compiled operators", "transformer-engine", "apex",
            "CPU cores", "memory"} <= names  # fmt: skip
    assert len(findings) <= 20 and all("\n" not in f.detail for f in findings)
