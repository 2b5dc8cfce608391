"""A rank that does not start says why, to people and to launchers."""

import json
from pathlib import Path

import pytest

from megarl.monitor.first_error import cause_of
from megarl.rundir import RunDir
from megarl.train import main
from tests.test_cli import MODEL


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


def test_servers_of_another_model_are_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name, hidden in (("model", 64), ("served", 128)):
        folder = tmp_path / name
        folder.mkdir()
        for file in ("tokenizer.json", "model.safetensors"):
            (folder / file).write_text("{}")
        (folder / "config.json").write_text(json.dumps({**MODEL, "hidden_size": hidden}))
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    settings = [f"run.dir={tmp_path}/run", "run.steps=1", f"model.hf={tmp_path}/model"]
    settings += ["optim.lr=1e-4", "algo.policy.name=gspo", f"data.prompts={tmp_path}/prompts.jsonl"]
    assert main([*settings, f"rollout.model={tmp_path}/served"]) == 2
    said = capsys.readouterr().err
    assert "1 problem" in said and "rollout.model: hidden: found 128; accepted: 64, as" in said
