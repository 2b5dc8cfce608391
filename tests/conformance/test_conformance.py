"""The command of docs/conformance.md: on the shipped vectors, on cases of our own whose results are
computed another way (``naive*.py``), and on what is wrong.
"""

import copy
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.conformance import __main__ as command
from megarl.conformance.cases import differences, encode
from megarl.conformance.kinds import KINDS
from megarl.conformance.sections import ALGOS, ESTIMATORS
from megarl.ops import KERNELS, native_library
from tests.conformance import extra

ROOT = Path(__file__).parent.parent.parent
SHIPPED = json.loads((ROOT / "tests" / "vectors" / "objectives.json").read_text())
BACKEND = "torch" if native_library() is None else "native"  # of this process
Json = dict[str, Any]
Run = Callable[..., tuple[int, dict[str, Json]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The command in this process, with whatever operators it has loaded: (exit code, results)."""
    monkeypatch.setenv(command.VARIABLE, BACKEND)  # also undoes what the command sets
    log = logging.getLogger("megarl.ops")
    level = log.level

    def go(cases: list[Json], dtype: str = "float64") -> tuple[int, dict[str, Json]]:
        file, out = extra.write(tmp_path / "cases.json", cases), tmp_path / "results.json"
        code = command.main([str(file), "--backend", BACKEND, "--dtype", dtype, "--out", str(out)])
        return code, read(out)

    yield go
    log.setLevel(level)


def read(out: Path) -> dict[str, Json]:
    return {entry["id"]: entry for entry in json.loads(out.read_text())}


def shipped(*names: str) -> list[Json]:
    return [copy.deepcopy(c) for c in SHIPPED["cases"] if c["id"] in names]


def everything() -> list[Json]:
    return [*SHIPPED["cases"], *extra.cases()]


def failures(results: dict[str, Json]) -> dict[str, Any]:
    return {k: v.get("reason") for k, v in results.items() if v["status"] != "pass"}


# ---- all cases


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_all_cases_pass_with_the_compiled_operators(
    run: Run, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if BACKEND == "torch":
        pytest.skip("the compiled operators are not here")
    cases = everything()
    code, results = run(cases, dtype)
    assert failures(results) == {} and code == 0
    assert list(results) == [c["id"] for c in cases]
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["kind", "cases", "pass", "fail", "unsupported"]
    assert {line.split()[0] for line in table[1:]} == {*KINDS, "all"}
    assert table[-1].split() == ["all", str(len(cases)), str(len(cases)), "0", "0"]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_all_cases_pass_with_the_references(tmp_path: Path, dtype: str) -> None:
    file, out = extra.write(tmp_path / "cases.json", everything()), tmp_path / "results.json"
    done = in_its_own_process(str(file), "--backend", "torch", "--dtype", dtype, "--out", str(out))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert failures(read(out)) == {}


def in_its_own_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megarl.conformance", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "MEGARL_OPS"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_every_kind_key_and_choice_of_the_format_is_covered() -> None:
    cases = everything()
    assert {c["kind"] for c in cases} == set(KINDS) == set(SHIPPED["meta"]["kinds"])
    assert {c["config"].get("estimator") for c in cases} >= set(ESTIMATORS)
    losses = [c["config"].get("loss", c["config"]) for c in cases]
    assert {c.get("algo") for c in losses} >= set(ALGOS)
    for kind, names in (("elementwise", ALGOS), ("loss", ALGOS)):
        assert {c["config"].get("algo") for c in cases if c["kind"] == kind} >= set(names)
    keys = {key for c in cases for key in _keys(c["config"])}
    assert set(KEYS.split()) <= keys
    chosen = {(k, v) for c in cases for k, v in _choices(c["config"])}
    assert {(k, v) for k, values in CHOICES.items() for v in values.split()} <= chosen


# The format's keys, and the choices some of them have
KEYS = """
    estimator ddof eps scale singleton truncated_variant f_norm algo eps_low eps_high dual_clip
    w_min w_max ppo_mask tau_pos tau_neg tis_max mode seq_denominator constant denominator_mask
    type coef input_clamp output_clamp is_weight entropy_coef level low high geo_filter veto
    batch_normalize delta against gamma lam masked_reward value_clip l_max l_cache c0 target c_min
    c_max ratio temperature
"""
CHOICES = {
    "scale": "group batch none",
    "truncated_variant": "exclude include",
    "mode": """token_mean seq_mean_token_mean seq_mean_token_sum constant group_token_mean
        truncate mask""",
    "seq_denominator": "nonempty all",
    "denominator_mask": "original kept",
    "type": "k1 k2 k3 k3+",
    "is_weight": "old self",
    "level": "token sequence geometric",
    "against": "rollout old",
    "masked_reward": "credit_prev drop",
}


def _keys(config: Json) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if isinstance(value, dict):
            yield from _keys(value)


def _choices(config: Json) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _choices(value)
        elif isinstance(value, str):
            yield key, value


# ---- verdicts


SOME = ("adv_rloo", "loss_poison_ppo_k3", "kl_k1", "gae_099_095", "rc_seq_tis", "mismatch_metrics")


def test_what_is_computed_does_not_depend_on_what_is_expected(run: Run) -> None:
    cases = shipped(*SOME, "value_loss_clip_0.2", "kl_cov_topk", "logits_temp_0.625")
    code, with_it = run(cases)
    assert code == 0
    for case in cases:
        del case["expected"], case["tolerance"]
    code, without = run(cases)
    assert code == 1
    assert {r["status"] for r in without.values()} == {"unsupported"}
    assert {r["reason"] for r in without.values()} == {
        "nothing to compare with: the case has no `expected`"
    }
    assert {k: r["computed"] for k, r in with_it.items()} == {
        k: r["computed"] for k, r in without.items()
    }


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("adv_rloo", ["advantages", 0], 0.5),
        ("adv_rloo", ["valid", 3], False),
        ("adv_rloo", ["advantages"], []),
        ("loss_poison_ppo_k3", ["loss"], "nan"),
        ("loss_poison_ppo_k3", ["metrics", "n_tokens"], 24),
        ("loss_poison_ppo_k3", ["rollout_keep", 2, 0], 0),
        ("rc_seq_tis", ["seq_geo_ratio", 5], 1.0),
        ("rc_seq_tis", ["seq_geo_ratio", 4], None),
        ("kl_k1", ["another"], 1),
        ("overlong_dapo", ["penalty", 3], -0.0002441406251),
    ],
)
def test_a_wrong_expectation_fails(run: Run, name: str, path: list[Any], value: Any) -> None:
    (case,) = shipped(name)
    *inner, last = path
    at = case["expected"]
    for key in inner:
        at = at[key]
    at[last] = value
    code, results = run([case, *shipped("adv_dr_grpo_mean_only")])
    assert code == 1
    assert results[name]["status"] == "fail" and str(path[0]) in results[name]["reason"]
    assert results["adv_dr_grpo_mean_only"]["status"] == "pass"


def test_tolerances_are_the_cases_own_and_float32_cannot_be_loosened(run: Run) -> None:
    (case,) = shipped("overlong_dapo")
    case["expected"]["penalty"][4] = -0.5 * (1 + 1e-4)
    assert run([case])[0] == 1
    case["tolerance"]["float64"]["rtol"] = 1e-3
    case["tolerance"]["float32"]["rtol"] = 1e-3
    assert run([case])[0] == 0
    assert run([case], "float32")[0] == 1


def test_informative_keys_are_not_compared(run: Run) -> None:
    (case,) = shipped("long_sequence_sum_131072")
    case["expected"]["info_naive_float32_sum"] = 12.0
    assert run([case])[0] == 0


def test_numbers_that_are_not_finite() -> None:
    def different(expected: Any, computed: Any) -> bool:
        return bool(list(differences(expected, computed, 1e-3, 1.0)))

    nan, inf = float("nan"), float("inf")
    assert not different(nan, nan) and not different(inf, inf) and not different(1.0, 1)
    assert different(inf, -inf) and different(nan, 1.0) and different(1e300, inf)
    assert different(None, 0.0) and different(3, 4) and not different(3, 3.5)
    assert encode({"a": [nan, inf, -inf, 1.5, None]}) == {"a": ["nan", "inf", "-inf", 1.5, None]}


def test_results_of_another_implementation_are_judged_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = shipped("kl_k1", "kl_k2", "kl_k3_clamped_20_10")
    theirs = [{"id": c["id"], "computed": copy.deepcopy(c["expected"])} for c in cases[:2]]
    theirs[1]["computed"]["value"][0] += 1.0
    file, results, out = (tmp_path / name for name in ("cases.json", "theirs.json", "out.json"))
    extra.write(file, cases)
    results.write_text(json.dumps(theirs))
    assert command.main([str(file), "--judge", str(results), "--out", str(out)]) == 1
    assert [r["status"] for r in read(out).values()] == ["pass", "fail", "unsupported"]
    results.write_text(json.dumps({"cases": theirs}))
    assert command.main([str(file), "--judge", str(results), "--out", str(out)]) == 2
    results.write_text(json.dumps([{"id": "kl_k1"}]))
    assert command.main([str(file), "--judge", str(results), "--out", str(out)]) == 2
    assert "result 0 has not both id and computed" in capsys.readouterr().err


def test_what_lies_on_masked_tokens_does_not_change_a_bit(run: Run) -> None:
    clean = [c for c in everything() if c["kind"] in POISONED]
    poisoned = [
        {**c, "inputs": {k: _poisoned(k, v, c["inputs"]["mask"], POISONED[c["kind"]])
                         for k, v in c["inputs"].items()}}
        for c in clean
    ]  # fmt: skip
    before, after = run(clean), run(poisoned)
    assert before[0] == after[0] == 0
    assert before[1] == after[1]


# kind -> inputs that are garbage where nothing is trained
POISONED = {
    "loss": "logp logp_old logp_rollout logp_ref entropy advantages",
    "rollout_correction": "logp_old logp_rollout",
    "mismatch_metrics": "logp_old logp_rollout",
    "value_loss": "values values_old returns",
    "gae": "values",
    "reinforce_pp": "kl",
    "kl_cov": "logp logp_old advantages",
}


def _poisoned(name: str, values: Any, mask: list[list[int]], names: str) -> Any:
    if name not in names.split():
        return values
    bad = ["nan", "inf", "-inf", 1e30]
    return [
        [x if m else bad[(i + t) % 4] for t, (x, m) in enumerate(zip(xs, ms, strict=True))]
        for i, (xs, ms) in enumerate(zip(values, mask, strict=True))
    ]


# ---- what is not known


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("kl_k1", {"kind": "kl2"}, "kind 'kl2' is unknown"),
        ("kl_k1", {"config": {"type": "k4"}}, "config.type"),
        ("kl_k1", {"config": {"type": "k1", "clamp": 3}}, "config.clamp is unknown"),
        ("kl_k1", {"config": {}}, "config.type is missing"),
        ("adv_rloo", {"config": {"estimator": "gdpo"}}, "config.estimator is 'gdpo'"),
        (
            "adv_rloo",
            {"config": {"estimator": "rloo", "scale": "batch"}},
            "config.scale='batch' is not known of rloo",
        ),
        ("ew_reinforce", {"config": {"algo": "kl_cov"}}, "config.algo is 'kl_cov'"),
        ("ew_reinforce", {"config": {"algo": "gspo", "dual_clip": 3.0}}, "dual_clip=3.0"),
        ("ew_reinforce", {"config": {"algo": "ppo_clip", "eps_low": "x"}}, "config.eps_low"),
        ("ew_reinforce", {"inputs": {"logp": [1.0]}}, "inputs.logp_old is missing"),
        ("loss_sapo", {"config": {"algo": "sapo"}}, "config.agg is missing"),
        (
            "loss_sapo",
            {"config": {"algo": "sapo", "agg": {"mode": "token_mean", "denominator": 1}}},
            "config.agg.denominator is unknown",
        ),
        (
            "loss_sapo",
            {"config": {"algo": "sapo", "agg": {"mode": "constant"}}},
            "config.agg.constant",
        ),
        ("rc_seq_tis", {"config": {"level": "sequence", "k3_filter": 1.0}}, "config.k3_filter"),
        ("gae_099_095", {"config": {"gamma": 0.9, "whiten": True}}, "config.whiten is unknown"),
        ("overlong_dapo", {"inputs": {}}, "inputs.lengths is missing"),
        ("shard_gspo_seq_mean", {"config": {"cp": "two"}}, "config.cp is 'two'"),
    ],
)
def test_what_is_not_known_is_unsupported_with_a_reason(
    run: Run, name: str, change: Json, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,) = shipped(name)
    code, results = run([{**case, **change}])
    assert code == 1
    assert results[name]["status"] == "unsupported" and results[name]["computed"] == {}
    assert reason in results[name]["reason"]
    assert f"unsupported: {name}: " in capsys.readouterr().err


def test_a_case_that_cannot_be_computed_fails_alone(run: Run) -> None:
    broken, good = shipped("kl_k1", "kl_k2")
    broken["inputs"]["logp_ref"].pop()
    code, results = run([broken, good])
    assert code == 1
    assert results["kl_k1"]["status"] == "fail" and "RuntimeError" in results["kl_k1"]["reason"]
    assert results["kl_k2"]["status"] == "pass"


GOOD = {"id": "a", "kind": "overlong"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no list `cases`"),
        ('{"cases": {}}', "has no list `cases`"),
        (json.dumps({"cases": [1]}), "case 0 is not an object"),
        (json.dumps({"cases": [GOOD, {"kind": "kl"}]}), "case 1 has no id"),
        (json.dumps({"cases": [{"id": "a"}]}), "case 0 has no kind"),
        (json.dumps({"cases": [GOOD, GOOD]}), "case 1: the id 'a' is there twice"),
        (json.dumps({"cases": [{**GOOD, "config": 3}]}), "case 0 (a): config is not an object"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read(
    run: Run, tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "broken.json", tmp_path / "out.json"
    if text is not None:
        file.write_text(text)
    assert command.main([str(file), "--backend", BACKEND, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_results_that_cannot_be_written(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = extra.write(tmp_path / "cases.json", shipped("kl_k1"))
    out = tmp_path / "no" / "folder" / "results.json"
    assert command.main([str(file), "--backend", BACKEND, "--out", str(out)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_backend_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megarl.ops.native_devices", lambda op: frozenset({"cuda"}))
    assert command.main(["x.json", "--backend", "native", "--out", str(tmp_path / "r")]) == 2
    assert f"no compiled {', '.join(KERNELS)} in" in capsys.readouterr().err
    monkeypatch.setattr("megarl.ops.native_library", lambda: Path("_C.so"))
    assert command.main(["x.json", "--backend", "torch", "--out", str(tmp_path / "r")]) == 2
    assert "has loaded the compiled operators already" in capsys.readouterr().err
