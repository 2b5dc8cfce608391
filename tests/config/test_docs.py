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
    for inner in ("algo.kl.adaptive", "rollout.length_stages[]", "algo.entropy, name: adaptive"):
        assert f"### {inner}\n" in text


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
        ("algo.kl.adaptive.target", "a number > 0"),
        (
            "rollout.length_stages",
            "a list of sections with the keys max_new_tokens, until_step, until_converged",
        ),
        ("rollout.length_stages[].until_step", "an integer > 0, or null"),
    ],
)
def test_what_a_setting_accepts_is_said_in_words(key: str, words: str) -> None:
    assert fields.accepted(next(s.info for s in fields.settings() if s.key == key)) == words


WHOLE = {
    "run": {"dir": "/r", "steps": 1},
    "model": {"hf": "/m"},
    "precision": {"fp8": {}},
    "optim": {"lr": 1, "precision_aware": {}, "cpu_offload": {}},
    "algo": {
        "policy": {"name": "gspo"},
        "kl": {"coef": 1, "adaptive": {"target": 1, "horizon": 1}},
        "entropy": {"name": "adaptive"},
        **{"correction": {}, "opsm": {"delta": 1}, "value": {}, "dynamic_sampling": {}},
        "overlong": {"l_max": 2, "l_cache": 1},
    },
    "critic": {"parallel": {}},
    "rollout": {"length_stages": [{"max_new_tokens": 1, "until_converged": {}}]},
    "eval": {"sets": [{"name": "a", "prompts": "p"}]},
}
CHOSEN = {
    "algo.policy": "gspo",
    "algo.advantage": "grpo",
    "algo.aggregation": "seq_mean_token_mean",
    "algo.entropy": "adaptive",
}


def leaves(value: object, key: str) -> set[str]:
    """Dotted keys of a dumped configuration; a list of sections is a leaf and has leaves."""
    if isinstance(value, dict):
        prefix = f"{key}." if key else ""
        return {leaf for name, inner in value.items() for leaf in leaves(inner, f"{prefix}{name}")}
    items = value if isinstance(value, list | tuple) else []
    return {key}.union(*(leaves(v, f"{key}[]") for v in items if isinstance(v, dict)))


def test_there_is_a_setting_for_every_leaf_of_a_resolved_configuration() -> None:
    config = Config.model_validate(WHOLE)
    keys = {
        s.key
        for s in fields.settings()
        if s.member is None or CHOSEN[s.key.rpartition(".")[0]] == s.member
    }
    assert keys == leaves(config.model_dump(), "")


def test_given_keys_are_what_was_set_and_sections_given_without_a_setting() -> None:
    config = Config.model_validate(WHOLE)
    given = fields.given_keys(config)
    assert {k: fields.lookup(config, k) for k in given} == given
    assert set(given) == {
        *(
            "eval.sets",
            "run.dir",
            "run.steps",
            "model.hf",
            "optim.lr",
            "algo.policy.name",
            "algo.kl.coef",
        ),
        *("precision.fp8", "optim.precision_aware", "optim.cpu_offload"),
        *("algo.kl.adaptive.target", "algo.kl.adaptive.horizon", "algo.entropy.name"),
        *("algo.correction", "algo.opsm.delta", "algo.value", "algo.dynamic_sampling"),
        *("algo.overlong.l_max", "algo.overlong.l_cache", "rollout.length_stages"),
        "critic.parallel",
    }
    plain = Config.model_validate({**WHOLE, "algo": {"policy": {"name": "gspo"}}, "monitor": {}})
    assert "monitor" not in fields.given_keys(plain)  # the default itself


def test_the_schema_of_a_choice_is_that_of_what_was_chosen() -> None:
    config = Config.model_validate(WHOLE)
    assert fields.field_of(config, "algo.entropy.c_max").get_default() == 1.0
    assert fields.field_of(config, "algo.kl").get_default() is None
    assert fields.field_of(config, "run").is_required()
