"""Settings without an effect: the table, and whether the program reads what it lets through."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import megarl
from megarl.config import fields
from megarl.config.load import load_config
from megarl.config.schema import Config, OptimSection
from megarl.config.section import Section
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
        (SFT, "algo.advantage.name=rloo", "rloo, which has no effect"),
        (SFT, "algo.advantage={name: grpo}", "run.mode=sft imitates"),
        (SFT, "algo.kl.coef=0.1", "policy, aggregation, entropy and minibatches"),
        (SFT, "algo.dynamic_sampling={}", "{}, which has no effect"),
        (SFT, "algo.correction={}", "imitates"),
        (SFT, "algo.opsm.delta=0.5", "imitates"),
        (SFT, "algo.value.clip=0.5", "imitates"),
        (SFT, "algo.overlong_filter=true", "True, which has no effect"),
        (SFT, "rollout.length_stages=[{max_new_tokens: 8}]", "[{'max_new_tokens': 8}], which"),
        (SFT, "algo.old_logprobs=rollout", "run.mode=rl"),
        (SFT, "rollout.temperature=0.5", "0.5"),
        (SFT, "rollout.urls=[http://a:1]", "['http://a:1'], which has no effect"),
        (SFT, "sync.bucket_mb=1", "sent on"),
        (SFT, "eval.every=3", "3"),
        (SFT, "moe.routing_replay=rollout", "neither rollouts nor a pass before the update"),
        (SFT, "moe.routing_replay=old_logprobs", "run.mode=rl"),
        (SFT, "monitor.record_rollouts=true", "nothing is sampled"),
        (REPLAY, "data.prompts_per_step=4", "replays data.recorded"),
        (REPLAY, "rollout.max_new_tokens=4", "fixed"),
        (REPLAY, "monitor.record_rollouts=true", "fixed"),
        (REPLAY, "monitor.samples_per_step=3", "3"),
        (URLS, "rollout.port=3000", "already run with settings of their own"),
        (URLS, "rollout.fixed_shape=false", "leave out rollout.urls"),
        (URLS, "rollout.fp8=f32", "leave out rollout.urls"),
        (SGLANG, "rollout.fp8=power_of_two", "rollout.engine=sglang"),
        (SFT, "rollout.fp8=f32", "nothing is sampled"),
        (SGLANG, "rollout.max_running=2", "rollout.engine=sglang"),
        (SGLANG, "rollout.fixed_shape=false", "rollout.server_args for SGLang's own"),
        (RL, "rollout.server_command=[python]", "rollout.engine=embedded"),
        (RL, "rollout.server_args=[a]", "or rollout.engine=sglang"),
        (RL, "eval.max_new_tokens=9", "no held-out prompts"),
        (RL, "data.heldout=/h", "there is no evaluation"),
        (
            [*RL, "eval.sets=[{name: a, prompts: /p, every: 1, max_new_tokens: 5}]"],
            *("eval.max_new_tokens=9", "no held-out prompts"),
        ),
        (RL, "optim.min_lr_ratio=0.1", "optim.decay_fraction=0"),
    ],
)
def test_a_setting_without_effect_is_named_with_its_value_and_the_reason(
    run: list[str], override: str, words: str
) -> None:
    assert unused(run) == {}
    ((key, text),) = unused([*run, override]).items()
    assert key.startswith(override.partition("=")[0])
    assert "has no effect" in text
    assert words in text


def test_expert_settings_need_experts() -> None:
    assert list(unused([*RL, "parallel.etp=2"], experts=0)) == ["parallel.etp"]
    assert unused([*RL, "parallel.etp=2"]) == unused([*RL, "parallel.etp=2"], experts=None) == {}


def test_every_setting_of_a_section_inside_a_section_is_covered() -> None:
    kl = "algo.kl={coef: 1, type: k2, adaptive: {target: 1, horizon: 1}}"
    keys = ["coef", "type", "adaptive.target", "adaptive.horizon"]
    assert set(unused([*SFT, kl])) == {f"algo.kl.{key}" for key in keys}
    assert unused([*RL, kl]) == {}
    overlong = "algo.overlong={l_max: 8, l_cache: 4}"
    assert set(unused([*SFT, overlong])) == {"algo.overlong.l_max", "algo.overlong.l_cache"}


@pytest.mark.parametrize(
    "override",
    [
        *("algo.kl=null", "algo.dynamic_sampling=null", "algo.overlong_filter=false"),
        *("algo.entropy={name: constant, coef: 0.1}", "algo.aggregation.name=token_mean"),
        *("rollout.length_stages=[]", "algo.minibatches=2"),
    ],
)
def test_what_is_off_or_is_read_is_no_problem_in_supervised_training(override: str) -> None:
    assert unused([*SFT, override]) == {}


def test_what_is_off_below_a_section_that_is_null_by_default_is_told_from_what_is_on() -> None:
    override = (
        "algo.kl={coef: 1, adaptive: null, output_clamp: null}"  # output_clamp: 10 by default
    )
    assert set(unused([*SFT, override])) == {"algo.kl.coef", "algo.kl.output_clamp"}


def test_a_mask_of_rejected_tokens_needs_something_that_rejects_them() -> None:
    mask = "algo.aggregation={name: token_mean, denominator_mask: kept}"
    for run, words in ((RL, "without algo.correction"), (SFT, "run.mode=sft imitates")):
        found = unused([*run, mask])
        assert list(found) == ["algo.aggregation.denominator_mask"]
        assert words in found["algo.aggregation.denominator_mask"]
    assert unused([*RL, mask, "algo.correction.veto=0.1"]) == {}


def test_one_stage_of_lengths_replaces_the_length() -> None:
    stages = "rollout.length_stages=[{max_new_tokens: 8}]"
    assert unused([*RL, stages]) == {}
    assert list(unused([*RL, stages, "rollout.max_new_tokens=8"])) == ["rollout.max_new_tokens"]


def test_the_temperature_of_recorded_rollouts_is_read_by_the_trainer() -> None:
    assert unused([*REPLAY, "rollout.temperature=0.5"]) == {}


def test_a_value_left_at_its_default_is_no_problem_but_a_written_one_is() -> None:
    assert "data.samples_per_prompt" in unused([*SFT, "data.samples_per_prompt=8"])  # the default
    assert unused(SFT) == {}


def test_every_rule_names_settings_that_exist() -> None:
    keys = {s.key for s in fields.settings()}
    parts = [key.split(".") for key in keys]
    sections = {".".join([*p[:n], "*"]) for p in parts for n in range(1, len(p))}
    for rule in RULES:
        for key in (*rule.keys, *rule.but):
            assert key in keys | sections, key


# --- is everything read? --------------------------------------------------------------------------


def words(source: str) -> tuple[set[str], set[str]]:
    """(attributes, names) that a file mentions."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    classes = {n.name for n in nodes if isinstance(n, ast.ClassDef)}  # its own properties read
    return attributes, classes | {n.id for n in nodes if isinstance(n, ast.Name)}


Words = tuple[set[str], set[str]]


def readers(place: str, model: type[BaseModel], name: str, files: dict[str, Words]) -> list[str]:
    """Files that read ``<...>.place.name``, or ``.name`` where the section is at hand.

    At hand: the file mentions the section's class or what that is made of (``def build(settings:
    OptimSection)``), or the section itself (``rollout = config.rollout``).
    """
    classes = {c.__name__ for c in model.__mro__ if issubclass(c, Section)} - {"Section"}
    return [
        path
        for path, (attributes, names) in files.items()
        if name in attributes and (place in attributes or classes & names)
    ]


def sections(model: type[BaseModel], place: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """(name of the setting that holds it, class) of every section below ``model`` and itself."""
    yield place, model
    for name, info in model.model_fields.items():
        inner = [fields.section(info), fields.listed(info), *fields.members(info).values()]
        for below in filter(None, inner):
            yield from sections(below, name)


def test_every_setting_is_read_by_the_program() -> None:
    """Accepted, validated and never applied is the worst kind of option. The sections' own
    properties count: what they make of settings is what the program reads.
    """
    paths = [p for p in PACKAGE.rglob("*.py") if p.name != "cli.py"]
    program = [p for p in paths if p.relative_to(PACKAGE).parts[0] != "config"]
    resolves = ("algo", "failures", "fp8", "policies", "rollout", "schema", "served")
    program += [PACKAGE / "config" / f"{name}.py" for name in resolves]
    files = {str(path.relative_to(PACKAGE)): words(path.read_text()) for path in program}
    unread = [
        f"{model.__name__}.{name}"
        for place, model in sections(Config, "config")
        for name, info in model.model_fields.items()
        if fields.section(info) is None and not readers(place, model, name, files)
    ]
    assert unread == ["RolloutSection.deterministic"]  # all that it does is refuse others


def test_the_search_for_readers_finds_both_forms_and_nothing_else() -> None:
    files = {
        "chain.py": words("x = config.optim.lr"),
        "section.py": words("def f(s: OptimSection): return s.lr"),
        "other.py": words("x = config.optim.eps; lr = 3"),
        "word.py": words("x = thing.lr"),
    }
    assert readers("optim", OptimSection, "lr", files) == ["chain.py", "section.py"]
