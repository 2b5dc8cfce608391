"""Settings without an effect: the table, and whether the program reads what it lets through."""

import ast
from pathlib import Path

import pytest

import megarl
from megarl.config import fields
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.config.unused import RULES, unused_settings

PACKAGE = Path(megarl.__file__).parent
ALWAYS = ["run.dir=/r", "run.steps=10", "model.hf=/m", "optim.lr=1"]
RL = [*ALWAYS, "algo.policy.name=gspo", "data.prompts=/p"]
SFT = [*ALWAYS, "run.mode=sft", "algo.policy.name=sft", "data.demonstrations=/d"]
REPLAY = [*ALWAYS, "run.mode=train_only", "algo.policy.name=gspo", "data.recorded=/r"]
URLS = [*RL, "rollout.urls=[http://a:1]"]
SGLANG = [*RL, "rollout.engine=sglang", "rollout.server_command=[python]"]


def unused(overrides: list[str], experts: int | None = 8) -> dict[str, str]:
    found = unused_settings(load_config([], overrides), experts)
    return {p.key: f"{p.found} | {p.accepted}" for p in found}


@pytest.mark.parametrize(
    "run, override, words",
    [
        (RL, "data.demonstrations=/d", "run.mode=rl trains on what it samples"),
        (RL, "data.recorded=/d", "run.mode to sft (demonstrations) or train_only"),
        (SFT, "data.prompts=/p", "run.mode=sft trains on data.demonstrations"),
        (SFT, "data.samples_per_prompt=4", "4, which has no effect"),
        (SFT, "algo.advantage=rloo", "rloo, which has no effect"),
        (SFT, "algo.old_logprobs=rollout", "run.mode=rl"),
        (SFT, "rollout.temperature=0.5", "0.5"),
        (SFT, "rollout.urls=[http://a:1]", "['http://a:1'], which has no effect"),
        (SFT, "sync.bucket_mb=1", "sent on"),
        (SFT, "eval.every=3", "3"),
        (SFT, "monitor.record_rollouts=true", "nothing is sampled"),
        (REPLAY, "data.prompts_per_step=4", "replays data.recorded"),
        (REPLAY, "rollout.max_new_tokens=4", "fixed"),
        (REPLAY, "monitor.record_rollouts=true", "fixed"),
        (REPLAY, "monitor.samples_per_step=3", "3"),
        (URLS, "rollout.port=3000", "already run with settings of their own"),
        (URLS, "rollout.fixed_shape=false", "leave out rollout.urls"),
        (SGLANG, "rollout.max_running=2", "rollout.engine=sglang"),
        (SGLANG, "rollout.fixed_shape=false", "rollout.server_args for SGLang's own"),
        (RL, "rollout.server_command=[python]", "rollout.engine=embedded"),
        (RL, "rollout.server_args=[a]", "or rollout.engine=sglang"),
        (RL, "eval.max_new_tokens=9", "no held-out prompts"),
        (RL, "data.heldout=/h", "there is no evaluation"),
        (RL, "optim.min_lr_ratio=0.1", "optim.decay_fraction=0"),
    ],
)
def test_a_setting_without_effect_is_named_with_its_value_and_the_reason(
    run: list[str], override: str, words: str
) -> None:
    assert unused(run) == {}
    found = unused([*run, override])
    assert list(found) == [override.partition("=")[0]]
    assert "has no effect" in found[override.partition("=")[0]]
    assert words in found[override.partition("=")[0]]


def test_expert_settings_need_experts() -> None:
    assert list(unused([*RL, "parallel.etp=2"], experts=0)) == ["parallel.etp"]
    assert unused([*RL, "parallel.etp=2"]) == unused([*RL, "parallel.etp=2"], experts=None) == {}


def test_the_temperature_of_recorded_rollouts_is_read_by_the_trainer() -> None:
    assert unused([*REPLAY, "rollout.temperature=0.5"]) == {}


def test_a_value_left_at_its_default_is_no_problem_but_a_written_one_is() -> None:
    assert "data.samples_per_prompt" in unused([*SFT, "data.samples_per_prompt=8"])  # the default
    assert unused(SFT) == {}


def test_every_rule_names_settings_that_exist_and_is_needed() -> None:
    keys = {s.key for s in fields.settings()}
    for rule in RULES:
        for key in (*rule.keys, *rule.but):
            wide = key.removesuffix(".*") in Config.model_fields
            assert key in keys or (key.endswith(".*") and wide), key


# --- is everything read? --------------------------------------------------------------------------


def words(source: str) -> tuple[set[str], set[str]]:
    """(attributes, names) that a file mentions."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return attributes, {n.id for n in nodes if isinstance(n, ast.Name)}


def readers(section: str, name: str, files: dict[str, tuple[set[str], set[str]]]) -> list[str]:
    """Files that read ``<...>.section.name``, or ``.name`` where the section is at hand.

    At hand: the file mentions the section's class (``def build(settings: OptimSection)``) or the
    section itself (``rollout = config.rollout``).
    """
    annotation = Config.model_fields[section].annotation
    assert isinstance(annotation, type)
    return [
        path
        for path, (attributes, names) in files.items()
        if name in attributes and (section in attributes or annotation.__name__ in names)
    ]


def test_every_setting_is_read_by_the_program() -> None:
    """Accepted, validated and never applied is the worst kind of option."""
    files = {
        str(path.relative_to(PACKAGE)): words(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "config" and path.name != "cli.py"
    }
    plain = {s.key for s in fields.settings() if s.member is None}
    unread = [key for key in sorted(plain) if not readers(*key.split("."), files)]
    # A policy's options are read by its function, which is handed the policy section.
    policy = {s.key.rpartition(".")[2] for s in fields.settings() if s.member is not None}
    read = files["algos/surrogates.py"][0] | {"name"}
    assert (unread, policy - read) == ([], set())


def test_the_search_for_readers_finds_both_forms_and_nothing_else() -> None:
    files = {
        "chain.py": words("x = config.optim.lr"),
        "section.py": words("def f(s: OptimSection): return s.lr"),
        "other.py": words("x = config.optim.eps; lr = 3"),
        "word.py": words("x = thing.lr"),
    }
    assert readers("optim", "lr", files) == ["chain.py", "section.py"]
