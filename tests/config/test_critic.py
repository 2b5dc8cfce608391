"""Where a critic is needed, and where one would have no effect."""

from pathlib import Path
from typing import Any

import pytest

from megarl.config.files import file_problems
from megarl.config.load import load_config
from megarl.config.training import critic_optimizer_steps, optimizer_steps
from megarl.config.validate import validate
from megarl.errors import ConfigError

RUN = ["run.dir=/r", "run.steps=3", "model.hf=/m", "optim.lr=1"]
RL = [*RUN, "data.prompts=/p"]
TRAIN_ONLY = [*RUN, "run.mode=train_only", "data.recorded=/d"]
SFT = [*RUN, "run.mode=sft", "data.demonstrations=/d", "algo.policy.name=sft"]
PPO = ["algo.policy.name=ppo_clip", "algo.advantage.name=gae"]
GRPO = ["algo.policy.name=ppo_clip"]
LR = "critic.lr=1e-5"


DIMS = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 100,
    "num_experts": 8,
    "moe_intermediate_size": 32,
}
SMALL = {**DIMS, "model_type": "qwen3", "num_key_value_heads": 2, "intermediate_size": 36}
del SMALL["num_experts"]


def problems(
    settings: list[str],
    world_size: int | None = None,
    hf: dict[str, Any] | None = None,
    critic_hf: dict[str, Any] | None = None,
) -> dict[str, str]:
    config = load_config([], settings)
    try:
        validate(
            config,
            world_size=world_size,
            num_gpus=0,
            hf_config=hf,
            critic_hf_config=critic_hf,
            supported_models={"qwen3", "qwen3_moe"},
            check_paths=False,
        )
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
        (
            [*RL, *GRPO, LR],
            {"critic.lr": "1e-05, which has no effect (only algo.advantage.name=gae"},
        ),
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


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        # without a critic, or without a use for one
        (["critic.optim.betas=[0.9,0.95]"], {"critic.optim.betas": "set critic.lr"}),
        (["critic.warmup_steps=1"], {"critic.warmup_steps": "set critic.lr"}),
        (["critic.hf=/small"], {"critic.hf": "set critic.lr"}),
        (["critic.parallel.tp=2"], {"critic.parallel.tp": "set critic.lr"}),
        (["critic.warmup_steps=0", "critic.load=null", "critic.hf=null"], {}),  # true
        # with one
        ([LR, "critic.warmup_steps=2"], {}),
        ([LR, "critic.warmup_steps=3"], {"critic.warmup_steps": "less than run.steps = 3"}),
        ([LR, "critic.optim.betas=[0.9,1]"], {"critic.optim.betas[1]": "a number >= 0 and < 1"}),
        ([LR, "critic.optim.warmup_steps=3"], {"critic.optim.warmup_steps": "the run's 3 opt"}),
        ([LR, "critic.optim.min_lr_ratio=0.1"], {"critic.optim.min_lr_ratio": "no effect"}),
        ([LR, "critic.optim={min_lr_ratio: 0.1, decay_fraction: 0.3}"], {}),
        # the policy's schedule is of the policy's steps, the critic's of the whole run
        ([LR, "critic.warmup_steps=1", "optim.warmup_steps=2"], {"optim.warmup_steps": "run's 2"}),
        ([LR, "critic.warmup_steps=1", "critic.optim.warmup_steps=2"], {}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_settings_of_the_critic_are_used_or_refused(
    settings: list[str], wrong: dict[str, str]
) -> None:
    found = problems([*RL, *PPO, "data.reward=exact_match", *settings])
    if "critic.lr" not in " ".join(settings):  # which rl needs: of this test it is not
        assert found.pop("critic.lr")
    assert found.keys() == wrong.keys(), found
    for key, words in wrong.items():
        assert words in found[key], found


def test_all_settings_of_a_critic_without_use_are_named_at_once() -> None:
    given = [LR, "critic.optim.eps=1e-7", "critic.load=/c", "critic.parallel={tp: 2, dp: 1}"]
    found = problems([*TRAIN_ONLY, *GRPO, *given])
    keys = {"critic.lr", "critic.optim.eps", "critic.load"}
    assert found.keys() == keys | {"critic.parallel.tp", "critic.parallel.dp"}
    assert all("algo.advantage.name=gae" in text for text in found.values())


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (["critic.parallel={tp: 2}"], {}),
        (["critic.parallel={pp: 2, vpp: 3}"], {}),
        (["critic.parallel={dp: 2, ep: 2}"], {}),
        (["critic.parallel={tp: 4}"], {"critic.parallel": "equal to the number of ranks, 2"}),
        (["critic.parallel={dp: 1}"], {"critic.parallel": "equal to the number of ranks, 2"}),
        (
            ["critic.parallel={dp: 2, vpp: 2}"],
            {"critic.parallel.vpp": "1, or critic.parallel.pp > 1"},
        ),
        (["critic.parallel={dp: 2, ep: 4}"], {"critic.parallel.ep": "a product that divides tp 1"}),
        (["critic.parallel={pp: 2, vpp: 2}"], {"critic.parallel.vpp": "pp 2 = 3 (1, 3)"}),
        (
            ["critic.parallel={cp: 2}", "train.row_tokens=66"],
            {"train.row_tokens": "a multiple of 4 (2 * cp 2 * tp 1 of critic.parallel)"},
        ),
        (["critic.parallel={pp: 2}", "train.row_buckets=2"], {}),
        (
            [
                *("critic.parallel={dp: 2}", "parallel={tp: 2, dp: 1}"),
                *("data.prompts_per_step=1", "data.samples_per_prompt=1"),
            ],
            {"data.prompts_per_step": "dp 2 ranks of critic.parallel"},
        ),
    ],
    ids=str,
)
def test_a_layout_of_its_own_follows_the_rules_of_parallel(
    settings: list[str], wrong: dict[str, str]
) -> None:
    found = problems([*RL, *PPO, LR, "parallel={dp: 2}", *settings], 2, DIMS)
    assert found.keys() == wrong.keys(), found
    for key, words in wrong.items():
        assert words in found[key], found


def test_a_model_of_its_own_is_checked_against_the_layout_and_the_tokens() -> None:
    given = [*RL, *PPO, LR, "critic.hf=/small", "parallel.tp=4"]
    found = problems(given, 4, DIMS, SMALL)
    assert found.keys() == {"parallel.tp"}
    assert "num_key_value_heads = 2 of critic.hf" in found["parallel.tp"]
    own = [*given, "critic.parallel={dp: 2, tp: 2}"]
    assert problems(own, 4, DIMS, SMALL) == {}
    fewer = problems(own, 4, DIMS, {**SMALL, "vocab_size": 99})
    assert fewer == {"critic.hf": "a model of 99 tokens | one with the 100 tokens of model.hf"}
    other = problems(own, 4, DIMS, {**SMALL, "model_type": "gpt2"})
    assert other.keys() == {"critic.hf"} and "gpt2" in other["critic.hf"]


def test_the_critics_optimizer_is_that_of_the_policy_but_for_what_it_sets() -> None:
    given = ["optim={lr: 1, betas: [0.8, 0.9], clip_grad: 2, weight_decay: 0.1}", LR]
    config = load_config([], [*RL, *PPO, *given, "critic.optim={clip_grad: 0, warmup_steps: 2}"])
    changed = {"lr": 1e-5, "clip_grad": 0.0, "warmup_steps": 2}
    assert config.critic_optim.model_dump() == {**config.optim.model_dump(), **changed}
    fields = type(config.optim).model_fields.keys()
    shared = {"lr", "name", "muon", "schedule", "precision_aware", "cpu_offload"}
    assert type(config.critic.optim).model_fields.keys() == fields - shared


def test_the_policy_takes_no_optimizer_steps_while_the_critic_warms_up() -> None:
    config = load_config([], [*RL, *PPO, LR, "algo.minibatches=4", "critic.warmup_steps=1"])
    assert (optimizer_steps(config), critic_optimizer_steps(config)) == (8, 12)


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ([], (Path("/m"), None)),
        (["model.load=/c"], (Path("/m"), Path("/c"))),
        (["critic.hf=/s"], (Path("/s"), None)),
        (["critic.hf=/s", "model.load=/c"], (Path("/s"), None)),
        (["critic.load=/d", "model.load=/c"], (Path("/m"), Path("/d"))),
        (["critic.hf=/s", "critic.load=/d"], (Path("/s"), Path("/d"))),
    ],
    ids=str,
)
def test_a_critic_starts_from_its_own_files_before_the_policys(
    settings: list[str], start: tuple[Path, Path | None]
) -> None:
    config = load_config([], [*RL, *PPO, LR, *settings])
    assert (config.critic_hf, config.critic_load) == start


def test_files_of_the_critic_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "saved/critic").mkdir(parents=True)
    for settings, keys in (
        ([f"critic.hf={tmp_path}/none"], {"critic.hf"}),
        (
            [f"critic.hf={tmp_path}/empty", f"critic.load={tmp_path}/empty"],
            {"critic.hf", "critic.load"},
        ),
        ([f"critic.load={tmp_path}/saved"], set()),
    ):
        config = load_config([], [*RL, *PPO, LR, f"run.dir={tmp_path}/run", *settings])
        found = {p.key for p in file_problems(config)}
        assert {k for k in found if k.startswith("critic")} == keys


def test_the_preset_is_turned_to_recorded_values_as_it_says() -> None:
    preset = Path(__file__).resolve().parents[2] / "configs/algos/ppo.yaml"
    assert load_config([preset], RL).critic.lr is not None
    words = next(x for x in preset.read_text().splitlines() if "critic.lr=null" in x).split(": ")[1]
    config = load_config([preset], [*TRAIN_ONLY, *words.split()])
    validate(config, world_size=None, num_gpus=0, hf_config=None, check_paths=False)
    assert config.critic.lr is None
