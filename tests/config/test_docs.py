"""docs/configuration.md is the schema in words."""

from pathlib import Path

import pytest

from megarl.config import fields
from megarl.config.docs import configuration_markdown
from megarl.config.schema import Config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_in_the_repository_agrees_with_the_schema() -> None:
    assert PAGE.read_text("utf-8") == configuration_markdown(), (
        "run: megarl config docs > docs/configuration.md"
    )


def test_every_setting_of_every_policy_has_a_row() -> None:
    text = configuration_markdown()
    for setting in fields.settings():
        name = setting.key.rpartition(".")[2]
        assert f"| `{name}` | {fields.accepted(setting.info)} |" in text.replace(r"\|", "|")
    for tag in ("gspo", "ppo_clip", "sapo", "reinforce", "sft"):
        assert f"### algo.policy, name: {tag}\n" in text


@pytest.mark.parametrize(
    "key, words",
    [
        ("run.mode", "one of rl, sft, train_only"),
        ("run.steps", "an integer > 0"),
        ("optim.decay_fraction", "a number >= 0 and <= 1"),
        ("optim.betas", "a list of 2 numbers"),
        ("optim.distributed", "true or false"),
        ("parallel.etp", "an integer > 0, or null"),
        ("model.load", "a path, or null"),
        ("rollout.urls", "a list of texts"),
        ("algo.policy.dual_clip", "a number > 1, or null"),
        ("algo.policy.eps_low", "a number > 0 and < 1"),
    ],
)
def test_what_a_setting_accepts_is_said_in_words(key: str, words: str) -> None:
    assert fields.accepted(next(s.info for s in fields.settings() if s.key == key)) == words


def test_there_is_a_setting_for_every_leaf_of_a_resolved_configuration() -> None:
    raw = {
        "run": {"dir": "/r", "steps": 1},
        "model": {"hf": "/m"},
        "optim": {"lr": 1},
        "algo": {"policy": {"name": "gspo"}},
    }
    config = Config.model_validate(raw)
    keys = {s.key for s in fields.settings() if s.member in (None, "gspo")}
    dumped = {
        f"{section}.{name}" for section, values in config.model_dump().items() for name in values
    }
    assert keys - {k for k in keys if k.count(".") == 2} == dumped - {"algo.policy"}
    assert {k: fields.lookup(config, k) for k in fields.given_keys(config)} == {
        **{"run.dir": Path("/r"), "run.steps": 1, "model.hf": Path("/m")},
        **{"optim.lr": 1.0, "algo.policy.name": "gspo"},
    }
