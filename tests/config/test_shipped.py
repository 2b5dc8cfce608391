"""Every configuration file in the repository loads and is free of contradictions."""

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.validate import validate

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WHOLE = sorted(CONFIGS.glob("*.yaml"))
ALGOS = sorted(CONFIGS.glob("algos/*.yaml"))
CORRECTIONS = sorted(CONFIGS.glob("corrections/*.yaml"))

# Presets whose response lengths are the paper's need the room for them
_LONG = ["rollout.context_length=40000", "train.row_tokens=40000"]
_STEPS = ["data.reward=import:some.module:reward"]  # a function that gives steps
ROOM = {
    "grpo_process": _STEPS,
    "dapo": ["rollout.max_new_tokens=20480", *_LONG],
    "skywork_or1": _LONG,
}


@pytest.mark.parametrize("file", WHOLE, ids=lambda p: p.name)
def test_a_whole_configuration_is_consistent(file: Path) -> None:
    config = load_config([file], [])
    validate(config, world_size=None, num_gpus=0, hf_config=None, check_paths=False)


@pytest.mark.parametrize("file", ALGOS, ids=lambda p: p.name)
def test_an_algorithm_goes_on_top_of_any_run(file: Path) -> None:
    run = ["run.dir=/r", "run.steps=3", "model.hf=/m", "optim.lr=1"]
    run += ROOM.get(file.stem, [])
    if load_config([file], run).algo.policy.name == "sft":
        run += ["run.mode=sft", "data.demonstrations=/d"]
    else:
        run += ["data.prompts=/p"]
    config = load_config([file], run)
    validate(config, world_size=None, num_gpus=0, hf_config=None, check_paths=False)


@pytest.mark.parametrize("file", CORRECTIONS, ids=lambda p: p.name)
def test_a_correction_goes_on_top_of_an_algorithm(file: Path) -> None:
    run = ["run.dir=/r", "run.steps=3", "model.hf=/m", "optim.lr=1", "data.prompts=/p"]
    config = load_config([CONFIGS / "algos/gspo.yaml", file], run)
    validate(config, world_size=None, num_gpus=0, hf_config=None, check_paths=False)


def test_there_are_such_files() -> None:
    assert WHOLE and ALGOS and CORRECTIONS
