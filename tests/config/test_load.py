"""Files and overrides -> Config: merging, and what each mistake is answered with."""

from pathlib import Path

import pytest

from megarl.config.load import dump_given, dump_resolved, load_config, split_arguments
from megarl.config.schema import Config
from megarl.errors import ConfigError

NEEDED = ["run.dir=/tmp/run", "run.steps=3", "model.hf=/models/m", "optim.lr=1e-3"]
BASE = [*NEEDED, "algo.policy.name=gspo"]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problems(files: list[Path], overrides: list[str]) -> dict[str, str]:
    """Key -> "found | accepted" of every problem."""
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    found = {p.key: f"{p.found} | {p.accepted}" for p in caught.value.problems}
    assert len(found) == len(caught.value.problems)  # one problem a key
    for key in found:
        assert key in str(caught.value)
    return found


# --- merging --------------------------------------------------------------------------------------


def test_files_are_merged_left_to_right_and_overrides_last(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", "optim: {lr: 1.0, eps: 0.1, weight_decay: 0.1}")
    two = write(tmp_path / "2.yaml", "optim: {lr: 2.0, eps: 0.2}")
    config = load_config([one, two], [*BASE[:3], BASE[4], "optim.lr=3.0"])
    assert (config.optim.lr, config.optim.eps, config.optim.weight_decay) == (3.0, 0.2, 0.1)


def test_includes_are_relative_to_their_file_and_come_before_it(tmp_path: Path) -> None:
    write(tmp_path / "algos" / "a.yaml", "include: [b.yaml]\noptim: {lr: 2.0, eps: 0.2}")
    write(tmp_path / "algos" / "b.yaml", "optim: {lr: 1.0, eps: 0.1, weight_decay: 0.1}")
    top = write(tmp_path / "top.yaml", "include: [algos/a.yaml]\noptim: {lr: 3.0}")
    config = load_config([top], [*BASE[:3], BASE[4]])
    assert (config.optim.lr, config.optim.eps, config.optim.weight_decay) == (3.0, 0.2, 0.1)


def test_an_include_cycle_is_refused_and_shown(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "include: [b.yaml]")
    write(tmp_path / "b.yaml", "include: [a.yaml]")
    found = problems([tmp_path / "a.yaml"], BASE)
    (key,) = found
    assert key.endswith("a.yaml: include") and "cycle" in found[key] and "b.yaml" in found[key]


def test_the_same_file_twice_is_no_cycle(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "optim: {eps: 0.1}")
    one = write(tmp_path / "1.yaml", "include: [base.yaml]")
    two = write(tmp_path / "2.yaml", "include: [base.yaml]")
    assert load_config([one, two], BASE).optim.eps == 0.1


@pytest.mark.parametrize("text", ["3e-4", "3.0e-4", "'3e-4'", "0.0003"])
def test_a_float_may_be_written_in_any_way(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "a.yaml", f"optim: {{lr: {text}}}")
    assert load_config([file], [*BASE[:3], BASE[4]]).optim.lr == 3e-4
    assert load_config([], [*BASE, f"optim.lr={text}"]).optim.lr == 3e-4


@pytest.mark.parametrize(
    "override, key, expected",
    [
        ("rollout.urls=[http://a:1,http://b:2]", "urls", ("http://a:1", "http://b:2")),
        ("rollout.server_args=[]", "server_args", ()),
        ("rollout.key_file=null", "key_file", None),
        ("rollout.fixed_shape=false", "fixed_shape", False),
        ("rollout.server_command=[python, -m, a=b]", "server_command", ("python", "-m", "a=b")),
    ],
)
def test_override_values_are_yaml(override: str, key: str, expected: object) -> None:
    assert getattr(load_config([], [*BASE, override]).rollout, key) == expected


def test_a_later_policy_name_drops_the_settings_of_the_earlier_policy(tmp_path: Path) -> None:
    ppo = write(tmp_path / "p.yaml", "algo: {policy: {name: ppo_clip, eps_low: 0.2, dual_clip: 3}}")
    config = load_config([ppo], [*NEEDED, "algo.policy.name=gspo"])
    assert config.algo.policy == load_config([], BASE).algo.policy  # GSPO's own clip range
    kept = load_config([ppo], [*NEEDED, "algo.policy.eps_high=0.3"]).algo.policy
    assert (kept.name, kept.eps_low, kept.eps_high, kept.dual_clip) == ("ppo_clip", 0.2, 0.3, 3)


def test_a_later_architecture_drops_the_earlier_one(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", "model: {config: {model_type: a, q_lora_rank: 3, heads: 1}}")
    two = write(tmp_path / "2.yaml", "model: {config: {model_type: b, heads: 2}}")
    assert load_config([one, two], BASE).model.config == {"model_type": "b", "heads": 2}
    some = load_config([two], [*BASE, "model.config.heads=4", "model.config.new={x: null}"])
    assert some.model.config == {"model_type": "b", "heads": 4, "new": {"x": None}}
    again = write(tmp_path / "3.yaml", dump_given(some))
    assert load_config([again], []) == some


def test_what_lies_beneath_gives_way_to_every_file(tmp_path: Path) -> None:
    beneath = {"run": {"dir": "/r", "steps": 1}, "optim": {"lr": 1.0}, "model": {"hf": "/m"}}
    file = write(tmp_path / "1.yaml", "run: {steps: 7}\nalgo: {policy: {name: gspo}}")
    config = load_config([file], ["optim.lr=2"], beneath=beneath)
    assert (config.run.steps, config.optim.lr, config.model.hf) == (7, 2.0, Path("/m"))


def test_an_empty_section_sets_nothing(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", "optim: {eps: 0.1}")
    two = write(tmp_path / "2.yaml", "optim:\n  # lr: 1\nmonitor:\n")
    assert load_config([one, two], BASE).optim.eps == 0.1


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_TEST_ROOT", "/data")
    config = load_config(
        [], [*BASE, "model.hf=${oc.env:MEGARL_TEST_ROOT}/m", "run.dir=${model.hf}/r"]
    )
    assert (config.model.hf, config.run.dir) == (Path("/data/m"), Path("/data/m/r"))
    assert (
        "MEGARL_NOWHERE" in problems([], [*BASE, "model.hf=${oc.env:MEGARL_NOWHERE}"])["model.hf"]
    )


def test_a_tilde_is_the_home_directory() -> None:
    assert load_config([], [*BASE, "model.hf=~/m"]).model.hf == Path.home() / "m"


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, key, words",
    [
        # unknown keys, at every level, with the nearest valid one
        ("optin.lr=1", "optin", ["unknown key (the command line)", "did you mean optim?"]),
        ("optim.leaning_rate=1", "optim.leaning_rate", ["unknown key", "keys of optim: lr, betas"]),
        ("optim.bettas=[0,0]", "optim.bettas", ["did you mean optim.betas?"]),
        ("train.lr=1", "train.lr", ["did you mean optim.lr?", "keys of train: row_tokens"]),
        ("lr=1", "lr", ["did you mean optim.lr?"]),
        ("algo.policy.eps_lo=.1", "algo.policy.eps_lo", ["did you mean algo.policy.eps_low?"]),
        (
            "algo.policy.dual_clip=3",
            "algo.policy.dual_clip",
            ["an option of ppo_clip, aspo"],
        ),
        ("algo.policy.tau_pos=3", "algo.policy.tau_pos", ["an option of sapo only"]),
        # values
        ("run.mode=rll", "run.mode", ['"rll" (the command line)', "one of rl, sft, train_only"]),
        ("run.steps=ten", "run.steps", ['"ten"', "an integer > 0"]),
        ("run.steps=2.5", "run.steps", ["2.5", "an integer > 0"]),
        ("run.steps=0", "run.steps", ["0", "an integer > 0"]),
        ("run.steps=true", "run.steps", ["true", "an integer > 0"]),
        ("optim.lr=false", "optim.lr", ["false", "a number > 0"]),
        ("optim.lr=.nan", "optim.lr", ["NaN", "a number > 0"]),
        ("run.stop_grace_s=20", "run.stop_grace_s", ["20", "a number > 0 and <= 15"]),
        ("run.dir=2024_01_01", "run.dir", ["20240101", "a path (in quotes)"]),
        ("parallel.etp=0", "parallel.etp", ["0", "an integer > 0, or null"]),
        ("monitor.tensorboard=maybe", "monitor.tensorboard", ['"maybe"', "true or false"]),
        ("optim.betas=[1]", "optim.betas", ["[1]", "a list of 2 numbers"]),
        ("rollout.urls=http://a:1", "rollout.urls", ['"http://a:1"', "a list of texts"]),
        ("rollout.server_args=[a,0.8]", "rollout.server_args[1]", ["0.8", "in quotes"]),
        ("algo.policy=gspo", "algo.policy", ['"gspo"', "a section with name: gspo, gspo_token"]),
        ("algo.policy.name=gsop", "algo.policy.name", ['"gsop"', "did you mean gspo?", "sapo"]),
        ("optim=3", "optim", ["3", "a section with the keys lr, betas"]),
        ("optim.lr.max=3", "optim.lr", ["a number > 0"]),
        # inside sections of sections, and of lists
        (
            "algo.kl={coef: 1, adaptive: {target: x, horizon: 1}}",
            "algo.kl.adaptive.target",
            ['"x"', "a number > 0"],
        ),
        (
            "algo.kl={coef: 1, adaptive: {target: 1, horizon: 1, horizn: 2}}",
            "algo.kl.adaptive.horizn",
            ["unknown key", "did you mean algo.kl.adaptive.horizon?"],
        ),
        (
            "rollout.length_stages=[{max_new_tokens: 1},{max_new_tokens: 0}]",
            "rollout.length_stages[1].max_new_tokens",
            ["0 (the command line)", "an integer > 0"],
        ),
        (
            "rollout.length_stages=[{max_new_tokens: true}]",
            "rollout.length_stages[0].max_new_tokens",
            ["true", "an integer > 0"],
        ),
        (
            "rollout.length_stages=[{max_new_tokens: 1, until_stp: 2}]",
            "rollout.length_stages[0].until_stp",
            ["unknown key", "did you mean rollout.length_stages[0].until_step? keys of"],
        ),
        (
            "rollout.length_stages=[{until_step: 2}]",
            "rollout.length_stages[0].max_new_tokens",
            ["nothing; it has to be set"],
        ),
        (
            "rollout.length_stages=[{max_new_tokens: 1, until_converged: {window: 0}}]",
            "rollout.length_stages[0].until_converged.window",
            ["0", "an integer > 0"],
        ),
        (
            "rollout.length_stages={max_new_tokens: 1}",
            "rollout.length_stages",
            ["a list of sections with the keys max_new_tokens, until_step"],
        ),
        ("rollout.length_stages=[3]", "rollout.length_stages[0]", ["3 (the command line)"]),
        # placeholders
        ("model.hf=/path/to/model", "model.hf", ["/path/to/model", "a placeholder", "your own"]),
        ("data.prompts=<prompts.jsonl>", "data.prompts", ["a placeholder"]),
        ("run.dir=/scratch/your_name/run", "run.dir", ["a placeholder"]),
        ("rollout.server_command=[/path/to/python]", "rollout.server_command", ["a placeholder"]),
        # the override itself
        ("optim.lr", "override 'optim.lr'", ["not of the form key=value"]),
        ("optim.lr=", "override 'optim.lr='", ["not of the form key=value"]),
        ("--optim.lr=1", "override '--optim.lr=1'", ["not of the form key=value"]),
        ("optim.betas.0=1", "override 'optim.betas.0=1'", ["not of the form key=value"]),
        ("optim.betas=[1", "override 'optim.betas=[1'", ["not YAML after the ="]),
        ("include=[a.yaml]", "override 'include=[a.yaml]'", ["include outside a file"]),
    ],
)
def test_a_mistake_gives_exactly_its_problem(override: str, key: str, words: list[str]) -> None:
    found = problems([], [*BASE, override])
    assert list(found) == [key]
    for word in words:
        assert word in found[key]


@pytest.mark.parametrize(
    "text, words",
    [
        ("optim:\n  lr: [1\n", "line 3"),
        ("a: 1\nb: 2\na: 3\n", "line 3: found duplicate key a"),
        ("optim:\n\tlr: 1\n", "line 2"),
        ("- 1", "a list"),
        ("x: !!python/object/apply:os.system [touch /tmp/x]", "line 1"),
        ("x: !!set {a}", "not a supported"),
    ],
)
def test_a_file_that_is_not_settings_is_named_with_its_line(
    tmp_path: Path, text: str, words: str
) -> None:
    file = write(tmp_path / "bad.yaml", text)
    found = problems([file], [])
    assert list(found) == [str(file)]  # what it would have set is not called missing too
    assert words in found[str(file)]


def test_a_value_still_to_be_set_is_a_placeholder_until_a_later_layer_sets_it() -> None:
    assert "a placeholder" in problems([], ["model.hf='???'", *BASE[:2], *BASE[3:]])["model.hf"]
    assert load_config([], ["model.hf='???'", *BASE]).model.hf == Path("/models/m")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"run: {dir: caf\xe9}")
    missing = tmp_path / "no.yaml"
    found = problems([missing, tmp_path, latin], [])
    assert "no such file" in found[str(missing)]
    assert "directory" in found[str(tmp_path)]
    assert "utf-8" in found[str(latin)]


def test_missing_settings_are_listed_one_by_one_with_what_they_mean() -> None:
    found = problems([], [])
    assert list(found) == ["run.dir", "run.steps", "model.hf", "algo.policy", "optim.lr"]
    assert "Hugging Face folder" in found["model.hf"]
    assert "gspo, gspo_token, ppo_clip, sapo" in found["algo.policy"]
    found = problems([], [*NEEDED, "algo.policy.eps_low=0.1"])
    assert list(found) == ["algo.policy.name"] and "gspo" in found["algo.policy.name"]


def test_everything_is_reported_at_once_and_with_its_source(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.yaml",
        "optim: {btas: [0, 0]}\nparallel.tp: 2\nmodel: {hf: /path/to/model}\nrun: {steps: no}\n"
        "include: nothing.yaml",
    )
    found = problems([file, tmp_path / "no.yaml"], ["optim.lr=x", "oops", "run.dir=/r"])
    assert set(found) == {
        *(f"{file}: include", str(tmp_path / "no.yaml"), "override 'oops'"),
        *("optim.btas", "optim.lr", "parallel.tp", "model.hf", "run.steps"),
    }
    assert f"({file})" in found["optim.btas"]
    assert "(the command line)" in found["optim.lr"]
    assert "tp: on a line of its own, indented below parallel:" in found["parallel.tp"]


def test_files_are_told_from_overrides(tmp_path: Path) -> None:
    odd = write(tmp_path / "lr=3.yaml", "")
    arguments = ["a.yaml", "optim.lr=1", str(odd), "typo"]
    assert split_arguments(arguments) == ([Path("a.yaml"), odd, Path("typo")], ["optim.lr=1"])


# --- writing it down ------------------------------------------------------------------------------

RICH = [
    *BASE,
    "optim.betas=[0.8,0.9]",
    "optim.eps=1e-8",
    "run.dir='1e-4'",
    "data.reward='\\${x}'",
    "model.load=null",
    "rollout.urls=[http://a:1]",
    "algo.policy.eps_low=2e-4",
    "algo.dynamic_sampling={}",
    "algo.kl={coef: 0.1, adaptive: {target: 1, horizon: 2}}",
    "rollout.length_stages=[{max_new_tokens: 8, until_converged: {}},{max_new_tokens: 16}]",
]


def test_what_was_given_loads_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config([], RICH)
    text = dump_given(config)
    again = load_config([write(tmp_path / "config.yaml", text)], [])
    assert again == config and dump_given(again) == text
    assert again.data.reward == "${x}" and again.run.dir == Path("1e-4")
    assert "weight_decay" not in text and "sync" not in text  # only what was set
    assert "until_step" not in text and again.algo.dynamic_sampling is not None


def test_the_policy_is_named_even_where_the_name_was_a_default(tmp_path: Path) -> None:
    from megarl.config.algo import AlgoSection
    from megarl.config.policies import GspoPolicy
    from megarl.config.schema import ModelSection, OptimSection, RunSection

    config = Config(
        run=RunSection(dir="/r", steps=1),
        model=ModelSection(hf="/m"),
        algo=AlgoSection(policy=GspoPolicy()),
        optim=OptimSection(lr=1),
    )
    assert load_config([write(tmp_path / "c.yaml", dump_given(config))], []) == config


def test_the_resolved_dump_holds_every_setting() -> None:
    config = load_config([], RICH)
    assert Config.model_validate_json(dump_resolved(config)) == config
    assert '"weight_decay": 0.0' in dump_resolved(config)


def test_a_file_with_an_objective_is_a_whole_algorithm(tmp_path: Path) -> None:
    """Nothing of the algorithm before it remains; what comes behind it does."""
    first, second, own = (tmp_path / f"{n}.yaml" for n in ("first", "second", "own"))
    first.write_text("algo: {policy: {name: ppo_clip}, kl: {coef: 0.04}, minibatches: 4}")
    second.write_text("algo: {policy: {name: ppo_clip, eps_high: 0.3}}")
    own.write_text("algo: {opsm: {delta: 0.1}}")
    run = ["run.dir=/r", "run.steps=3", "model.hf=/m", "optim.lr=1"]
    algo = load_config([first, second, own], run).algo
    assert (algo.kl, algo.minibatches, algo.policy.eps_high) == (None, 1, 0.3)
    assert algo.opsm is not None
    assert load_config([first, own], [*run, "algo.policy.eps_high=0.3"]).algo.minibatches == 4
    own.write_text("algo: {policy: {eps_high: 0.5}}")  # one number of it names no other
    algo = load_config([first, own], run).algo
    assert (algo.minibatches, algo.policy.name, algo.policy.eps_high) == (4, "ppo_clip", 0.5)


@pytest.mark.parametrize("length", [200, 300, 5000])
def test_an_override_may_be_longer_than_a_name_of_a_file(length: int) -> None:
    words = ", ".join(["--flag"] * (length // 8))
    override = f"rollout.server_args=[{words}]"
    assert split_arguments(["a.yaml", override]) == ([Path("a.yaml")], [override])
