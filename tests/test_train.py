"""A rank that does not start says why, to people and to launchers."""

from pathlib import Path

import pytest

from megarl.monitor.first_error import cause_of
from megarl.rundir import RunDir
from megarl.train import main


def test_a_rank_that_refuses_its_settings_says_so_to_its_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "monday")
    run = tmp_path / "run"
    settings = [f"run.dir={run}", "run.steps=1", f"model.hf={tmp_path}", "optim.lr=1e-4"]
    settings += ["run.mode=sft", "algo.policy.name=sft", f"data.demonstrations={tmp_path}/none"]
    assert main(settings) == 2 and not run.exists()
    run.mkdir()
    assert main(settings) == 2
    cause = cause_of(RunDir(run, "monday").errors, [])
    assert cause is not None and cause.lasting and cause.name == "ConfigError"
    assert "data.demonstrations" in cause.text and "which does not exist" in cause.text
