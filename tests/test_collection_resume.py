"""A collection that goes on from a checkpoint, or stops for one: nothing is lost, nothing twice."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.books import read_books
from megarl.config.schema import Config
from megarl.schedule import decisive_settings
from tests.helpers.collecting import ALL, NONE, ORDER, SOME, Run, answers, runner, serials
from tests.helpers.dist import WorkerPool

PATTERN = [SOME, NONE, SOME, ALL, SOME, SOME, NONE, SOME, SOME, NONE, SOME, SOME]


@pytest.fixture
def run(pool: WorkerPool, tmp_path: Path) -> Run:
    return runner(pool, tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["synchronous", "one_step_off"])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("then", [[0], [0, 1]])
def test_a_run_that_goes_on_trains_what_it_would_have(
    run: Run, tmp_path: Path, schedule: str, at: int, then: list[int]
) -> None:
    """Surplus, rounds and prompts asked for ahead included, with more or fewer collectors."""
    settings = {"schedule": schedule, "max_rounds": 3, "answers": answers(*PATTERN), "total": 4}
    whole = run([0, 1], folder=str(tmp_path / "whole"), count=4, **settings)
    run([0, 1], count=at, ends=False, **settings)
    rest = run(then, first=at + 1, count=4, **settings)
    for a, b in zip(whole["steps"][at:], rest["steps"], strict=True):
        for key in ("samples", "rewards", "versions", "accuracy"):
            assert a[key] == b[key], key
        both = [[x or y for x, y in zip(*s["held"], strict=True)] for s in (a, b)]
        assert both[0] == both[1]
        drop = {"rollout/wait_seconds", "rollout/attempts"}  # of one process
        assert {k: v for k, v in a["metrics"].items() if k not in drop} == {
            k: v for k, v in b["metrics"].items() if k not in drop
        }
    books = [(tmp_path / p).read_text() for p in ("whole/books.jsonl", "books.jsonl")]
    assert books[0] == books[1]


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["synchronous", "asynchronous"])
def test_what_was_out_is_sampled_anew_under_its_name(
    run: Run, tmp_path: Path, schedule: str
) -> None:
    settings: dict[str, Any] = {"schedule": schedule, "max_staleness": 5, "total": 4}
    if schedule == "synchronous":
        settings["over_sampling"] = 1.5
    slow = {ORDER[1]: 99}
    first = run(count=2, ends=False, delays=slow, **settings)
    assert 1 not in [serial for step in first["steps"] for serial in serials(step)]
    rest = run([0, 1], first=3, count=4, **settings)
    again = [entry for issued in rest["issued"] for entry in issued]
    assert [entry for entry in again if entry[0] == 1] == [(1, ORDER[1], 1, 10)]
    balance = read_books(tmp_path / "books.jsonl")
    assert balance.balanced
    assert len(balance.ended["trained"]) == 16


@pytest.mark.dist
def test_lines_after_the_checkpoint_never_happened(run: Run, tmp_path: Path) -> None:
    run(count=2, ends=False, total=4)
    path = tmp_path / "books.jsonl"
    before = path.read_text()
    with path.open("a") as file:  # a third step that was lost with its process
        file.write('{"step": 3, "event": "issued", "groups": {"8": "p1"}, "samples": 3}\n{"st')
    run(first=3, count=4)
    assert path.read_text().startswith(before)
    assert read_books(path).balanced


@pytest.mark.dist
def test_a_stop_does_not_wait_for_the_next_steps_samples(run: Run) -> None:
    slow = dict.fromkeys(ORDER[4:8], 5)
    settings: dict[str, Any] = {"schedule": "one_step_off", "delays": slow, "total": 3}
    first = run(count=1, stops_after=1, ends=False, **settings)
    assert first["error"] == [None, None]
    rest = run(first=2, count=3, **settings)
    assert [serials(s) for s in rest["steps"]] == [[4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["synchronous", "one_step_off"])
def test_a_stop_in_a_step_that_has_no_samples_yet_changes_nothing(
    run: Run, tmp_path: Path, schedule: str
) -> None:
    slow = {ORDER[1]: 2, ORDER[4]: 4}
    settings = {"schedule": schedule, "total": 3, "delays": slow}
    whole = run(folder=str(tmp_path / "whole"), count=3, **settings)
    at = {"synchronous": 2, "one_step_off": 1}[schedule]  # its later ones wait before a push
    first = run([0, 1], count=3, stops_in=at, ends=False, **settings)
    assert len(first["steps"]) == at - 1
    rest = run(first=at, count=3, **settings) if at > 1 else run(count=3, **settings)
    for a, b in zip(whole["steps"], [*first["steps"], *rest["steps"]], strict=True):
        assert a["samples"] == b["samples"] and a["versions"] == b["versions"]


@pytest.mark.dist
def test_what_is_left_over_of_groups_of_another_size_expires(run: Run, tmp_path: Path) -> None:
    slow = {ORDER[1]: 99}
    run(count=1, total=3, over_sampling=1.5, ends=False, delays=slow)  # 5 is ready, 1 is out
    rest = run([0, 1], first=2, count=3, total=3, samples=2)
    assert rest["error"] == [None, None]
    issued, trained = 6 * 3 + 8 * 2, 4 * 3 + 8 * 2
    assert rest["counts"] == {"issued": issued, "trained": trained, "expired": 2 * 3}
    told = rest["steps"][-1]["metrics"]
    assert (told["books/issued"], told["books/trained"]) == ((issued,), (trained,))
    assert read_books(tmp_path / "books.jsonl").ended["expired"] == (1, 5)
    for step in rest["steps"]:
        assert [i for _, _, i, _ in step["samples"]] == [0, 1] * 4


CHANGES: list[tuple[str, Any, Any]] = [
    ("rollout.temperature", 1.0, 0.5),
    ("rollout.max_new_tokens", [10], [10, 20]),
    ("moe.routing_replay", "without rollout", "rollout"),
    ("rollout.mask_continued", False, True),
]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "was", "now"), CHANGES)
def test_groups_of_other_settings_are_not_trained_as_if_they_were_of_these(
    run: Run, tmp_path: Path, name: str, was: Any, now: Any
) -> None:
    script: dict[str, Any] = {"total": 3, "over_sampling": 1.5, "max_staleness": 5}
    kept = {"data.reward": "r", "rollout.other": 3}
    slow = {ORDER[1]: 99}  # 5 is ready, 1 is out
    run(count=1, ends=False, delays=slow, decisive={**kept, name: was}, **script)
    changed = {"decisive": {**kept, name: now}, "temperature": 0.5}
    rest = run([0, 1], first=2, count=3, **changed, **script)
    assert rest["error"] == [None, None]
    lines = map(json.loads, (tmp_path / "books.jsonl").read_text().splitlines())
    why = [line["why"] for line in lines if line["event"] == "expired" and line["groups"] == [5]]
    assert why == [f"{name} was {was}, is {now}"]
    assert [serials(step) for step in rest["steps"]] == [[1, 6, 7, 8], [9, 10, 11, 12]]
    assert read_books(tmp_path / "books.jsonl").balanced
    (anew,) = [entry for issued in rest["issued"] for entry in issued if entry[0] == 1]
    assert anew == (1, ORDER[1], 1, 20)
    assert {t for of_rank in rest["temperatures"] for t in of_rank.values()} == {0.5}


@pytest.mark.dist
def test_the_same_settings_go_on_with_what_there_is(run: Run, tmp_path: Path) -> None:
    script: dict[str, Any] = {"total": 3, "over_sampling": 1.5, "max_staleness": 5}
    decisive = {name: was for name, was, _ in CHANGES}
    run(count=1, ends=False, delays={ORDER[1]: 99}, decisive=decisive, **script)
    rest = run(first=2, count=3, decisive=decisive, **script)
    assert serials(rest["steps"][0])[:2] == [1, 5]
    (again,) = [entry for entry in rest["issued"][0] if entry[0] == 1]
    assert again == (1, ORDER[1], 1, 10)


@pytest.mark.dist
def test_another_reward_may_have_other_components(run: Run) -> None:
    script: dict[str, Any] = {"total": 3, "over_sampling": 1.5, "max_staleness": 5}
    run(count=1, ends=False, decisive={"data.reward": "one"}, **script)
    parts = dict.fromkeys(ORDER, ("a", "b"))
    rest = run(first=2, count=3, names=parts, decisive={"data.reward": "two"}, **script)
    assert rest["error"] == [None, None] and rest["names"] == ("a", "b")
    assert all(len(r) == 2 for step in rest["steps"] for r in step["rewards"])


SETTINGS = {
    "run": {"dir": "unused", "steps": 10},
    "model": {"hf": "unused"},
    "data": {"prompts": "unused"},
    "algo": {"policy": {"name": "gspo"}},
    "optim": {"lr": 1e-3},
}


@pytest.mark.parametrize(
    ("section", "given", "changed"),
    [
        ("rollout", {"temperature": 0.5}, "rollout.temperature"),
        ("rollout", {"max_new_tokens": 9}, "rollout.max_new_tokens"),
        (
            "rollout",
            {"length_stages": [{"max_new_tokens": 8, "until_step": 2}, {"max_new_tokens": 24}]},
            "rollout.max_new_tokens",
        ),
        ("rollout", {"mask_continued": True}, "rollout.mask_continued"),
        ("moe", {"routing_replay": "rollout"}, "moe.routing_replay"),
        ("data", {"prompts": "unused", "reward": "import:a.b:c"}, "data.reward"),
        ("moe", {"routing_replay": "old_logprobs"}, None),
        ("rollout", {"servers": 4, "over_sampling": 2, "schedule": "one_step_off"}, None),
        ("optim", {"lr": 1}, None),
    ],
)
def test_settings_that_decide_what_a_sample_is(
    section: str, given: dict[str, Any], changed: str | None
) -> None:
    was, now = (
        decisive_settings(Config.model_validate(settings))
        for settings in (SETTINGS, {**SETTINGS, section: given})
    )
    assert json.loads(json.dumps(now)) == now
    assert {name for name in now if now[name] != was[name]} == ({changed} if changed else set())
