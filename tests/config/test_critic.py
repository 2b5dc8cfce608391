"""Where a critic is needed, and where one would have no effect."""

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.validate import validate
from megarl.errors import ConfigError

RUN = ["run.dir=/r", "run.steps=3", "model.hf=/m", "optim.lr=1"]
RL = [*RUN, "data.prompts=/p"]
TRAIN_ONLY = [*RUN, "run.mode=train_only", "data.recorded=/d"]
SFT = [*RUN, "run.mode=sft", "data.demonstrations=/d", "algo.policy.name=sft"]
PPO = ["algo.policy.name=ppo_clip", "algo.advantage.name=gae"]
GRPO = ["algo.policy.name=ppo_clip"]
LR = "critic.lr=1e-5"


def problems(settings: list[str]) -> dict[str, str]:
    config = load_config([], settings)
    try:
        validate(config, world_size=None, num_gpus=0, hf_config=None, check_paths=False)
    except ConfigError as e:
        return {p.key: f"{p.found} | {p.accepted}" for p in e.problems}
    return {}


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ([*RL, *PPO, LR], {}),
        ([*RL, *PPO, LR, "algo.value.clip=null"], {}),
        ([*RL, *PPO], {"critic.lr": "nothing | a learning rate: algo.advantage.name=gae"}),
        ([*TRAIN_ONLY, *PPO], {}),  # with recorded values
        ([*TRAIN_ONLY, *PPO, LR], {}),
        ([*RL, *GRPO, LR], {"critic.lr": "1e-05, which has no effect | leave it out, or set"}),
        ([*TRAIN_ONLY, *GRPO, LR], {"critic.lr": "algo.advantage.name=gae"}),
        ([*SFT, LR], {"critic.lr": "algo.advantage.name=gae"}),
        ([*TRAIN_ONLY, *PPO, "algo.value.clip=0.1"], {"algo.value": "or set critic.lr"}),
        ([*RL, *GRPO, "algo.value.clip=0.1"], {"algo.value": "or set critic.lr"}),
    ],
    ids=lambda x: " ".join(x[3:]) if isinstance(x, list) else None,
)
def test_a_critic_is_there_exactly_where_it_is_used(
    settings: list[str], wrong: dict[str, str]
) -> None:
    found = problems(settings)
    assert found.keys() == wrong.keys(), found
    for key, words in wrong.items():
        assert words in found[key], found


def test_the_preset_is_turned_to_recorded_values_as_it_says() -> None:
    preset = Path(__file__).resolve().parents[2] / "configs/algos/ppo.yaml"
    assert load_config([preset], RL).critic.lr is not None
    words = next(x for x in preset.read_text().splitlines() if "critic.lr=null" in x).split(": ")[1]
    config = load_config([preset], [*TRAIN_ONLY, *words.split()])
    validate(config, world_size=None, num_gpus=0, hf_config=None, check_paths=False)
    assert config.critic.lr is None
