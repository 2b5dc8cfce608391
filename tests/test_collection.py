"""Which groups a step trains, under every schedule, alike on every rank and whatever ends first."""

import random
from pathlib import Path
from typing import Any

import pytest

from megarl.books import read_books
from tests.helpers.collecting import (
    ALL,
    EVEN,
    NONE,
    ORDER,
    PROMPTS,
    SOME,
    Run,
    answers,
    of_three,
    runner,
    serials,
)
from tests.helpers.dist import WorkerPool


@pytest.fixture
def run(pool: WorkerPool, tmp_path: Path) -> Run:
    return runner(pool, tmp_path)


# --- synchronous ----------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("collectors", [[0], [0, 1], [1]])
def test_a_step_is_one_round_whoever_collects(run: Run, collectors: list[int]) -> None:
    found = run(collectors, answers=answers(ALL, NONE, SOME), count=2)
    assert found["error"] == [None, None]
    assert [serials(s) for s in found["steps"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [s["accuracy"] for s in found["steps"]] == [4 / 12, 0.0]
    share = 4 // len(collectors)
    for n, step in enumerate(found["steps"]):
        holders = [collectors[(serial - 4 * n) // share] for *_, serial in step["samples"]]
        assert step["holders"] == holders  # a sample is there, and nowhere else
        for rank, held in enumerate(step["held"]):
            assert [tokens is not None for tokens in held] == [h == rank for h in holders]
    for k, rank in enumerate(collectors):
        mine = [4 * n + k * share + i for n in (0, 1) for i in range(share)]
        expected = [(s, ORDER[s], s // 4 + 1, 10 * (s // 4 + 1)) for s in mine]
        assert found["issued"][rank] == expected
    assert found["counts"] == of_three(issued=8, trained=8)


@pytest.mark.dist
def test_seeds_depend_on_neither_collectors_nor_what_ends_first(run: Run, tmp_path: Path) -> None:
    """Tokens are made of the seeds; a prompt that comes twice in a step has others then."""
    few = PROMPTS[:3]
    one = run([0], prompts=few, per_step=6, count=2)
    two = run([0, 1], prompts=few, per_step=6, count=2, delays={"p1": 3})
    for a, b in zip(one["steps"], two["steps"], strict=True):
        joined = [x if x is not None else y for x, y in zip(*b["held"], strict=True)]
        assert a["held"][0] == joined
        first = {tuple(t) for t in a["held"][0]}
        assert len(first) > 12  # of 18; made of remainders, so that a few may agree


@pytest.mark.dist
@pytest.mark.parametrize("collectors", [[0], [0, 1]])
def test_rounds_go_on_until_enough_teach_and_what_is_too_much_serves_the_next_step(
    run: Run, collectors: list[int]
) -> None:
    """1 of the first round teaches, 4 of the second: the third is not asked for; one is left, so
    that the next step asks for three.
    """
    pattern = [ALL, SOME, NONE, NONE, SOME, SOME, SOME, SOME, SOME, SOME, SOME, NONE]
    found = run(collectors, answers=answers(*pattern), max_rounds=4, count=2)
    first, second = found["steps"]
    assert serials(first) == [1, 4, 5, 6]
    assert serials(second) == [7, 8, 9, 10]
    assert second["versions"] == [0] * 3 + [1] * 9
    assert found["stream"]["offset"] == 11
    assert first["accuracy"] == pytest.approx((3 + 5) / 24)  # of all that came
    assert first["metrics"]["filter/informative_share"] == (5, 8)
    assert first["metrics"]["filter/rounds"] == (2,)
    assert second["metrics"]["filter/rounds"] == (1,)
    assert first["metrics"]["staleness/max"] == (0,)
    assert second["metrics"]["staleness/mean"] == (3 * 4, 12 * 4)
    assert second["metrics"]["staleness/tokens_1"] == (12, 48)
    assert found["counts"] == of_three(issued=11, trained=8, filtered=3)


@pytest.mark.dist
@pytest.mark.parametrize("need, ready", [(4, 9), (3, 7), (1, 6), (5, 12)])
def test_nothing_that_is_ready_is_ever_thrown_away(run: Run, need: int, ready: int) -> None:
    """Field case: nine are ready, four are needed; five stay. Over all steps, what was issued."""
    over = ready / need
    found = run(per_step=need, over_sampling=over, count=3, max_staleness=3, ends=False)
    trained = [serial for step in found["steps"] for serial in serials(step)]
    assert serials(found["steps"][0]) == list(range(need))
    assert trained == list(range(3 * need))
    assert found["counts"]["trained"] == 3 * 3 * need
    assert found["counts"]["issued"] == 3 * len(found["issued"][0])
    assert "expired" not in found["counts"]


@pytest.mark.dist
def test_more_prompts_than_an_epoch_has_go_on_in_the_next(run: Run) -> None:
    found = run(prompts=PROMPTS[:3], per_step=8)
    assert (found["stream"]["epoch"], found["stream"]["offset"]) == (2, 2)
    assert len(found["steps"][0]["samples"]) == 24


@pytest.mark.dist
def test_missing_groups_are_filled_with_the_earliest_uninformative_ones(run: Run) -> None:
    pattern = [ALL, NONE, SOME, NONE, NONE, SOME, ALL, ALL]
    found = run([0, 1], answers=answers(*pattern), max_rounds=2)
    (step,) = found["steps"]
    assert serials(step) == [0, 1, 2, 5]
    assert step["metrics"]["filter/informative_share"] == (2, 8)
    assert found["counts"] == of_three(issued=8, trained=4, filtered=4)


@pytest.mark.dist
def test_over_sampling_takes_what_ends_first_and_the_rest_goes_on_later(run: Run) -> None:
    slow = {ORDER[1]: 1, ORDER[4]: 9}
    found = run(over_sampling=1.5, count=3, delays=slow, max_staleness=5, ends=False)
    assert [serials(s) for s in found["steps"]] == [[0, 2, 3, 5], [1, 6, 7, 8], [9, 10, 11, 12]]
    assert found["recalls"][0] == 3
    assert found["counts"] == of_three(issued=6 + 3 + 5, trained=12)


@pytest.mark.dist
def test_what_is_stopped_and_not_kept_is_in_the_books(run: Run, tmp_path: Path) -> None:
    slow = dict.fromkeys(ORDER[:12], 1) | {ORDER[0]: 9}
    found = run(over_sampling=1.5, count=2, delays=slow, keeps=False)
    assert found["error"] == [None, None]
    balance = read_books(tmp_path / "books.jsonl")
    assert balance.balanced
    assert balance.ended["expired"] == (0,)
    assert "stopped half-way" in (tmp_path / "books.jsonl").read_text()


@pytest.mark.dist
def test_strictly_on_policy_what_is_left_expires(run: Run) -> None:
    pattern = [SOME] * 12
    kept = run(answers=answers(*pattern), over_sampling=1.5, count=2, max_staleness=0)
    assert [serials(s) for s in kept["steps"]] == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert kept["counts"] == of_three(issued=12, trained=8, expired=4)


# --- ahead ----------------------------------------------------------------------------------------


@pytest.mark.dist
def test_one_step_off_is_sampled_whole_by_the_weights_of_the_step_before(run: Run) -> None:
    found = run(schedule="one_step_off", count=4, delays={ORDER[5]: 3})
    assert [serials(s) for s in found["steps"]] == [list(range(4 * n, 4 * n + 4)) for n in range(4)]
    assert [set(s["versions"]) for s in found["steps"]] == [{0}, {0}, {1}, {2}]
    assert [s["metrics"]["staleness/max"] for s in found["steps"]] == [(0,), (1,), (1,), (1,)]
    assert found["counts"] == of_three(issued=16, trained=16)  # none for a fifth step
    limits = {(step, limit) for _, _, step, limit in found["issued"][0]}
    assert limits == {(n, 10 * n) for n in (1, 2, 3, 4)}  # those of the steps that train them
    assert found["recalls"] == [0, 0]


@pytest.mark.dist
def test_one_step_off_completes_rounds_before_the_weights_change(run: Run) -> None:
    pattern = [SOME] * 4 + [NONE] * 3 + [SOME] * 5
    settings = {"answers": answers(*pattern), "schedule": "one_step_off", "max_rounds": 3}
    found = run([0, 1], count=2, **settings)
    assert [serials(s) for s in found["steps"]] == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert set(found["steps"][1]["versions"]) == {0}


@pytest.mark.dist
@pytest.mark.parametrize("bound", [1, 2, 3])
def test_asynchronous_sampling_never_waits_and_is_never_staler_than_the_bound(
    run: Run, bound: int, tmp_path: Path
) -> None:
    rng = random.Random(bound)
    delays = {key: rng.choice([0, 0, 1, 2, 6]) for key in ORDER[:12]}
    found = run(
        [0, 1], schedule="asynchronous", max_staleness=bound, count=9, delays=delays, per_step=3
    )
    assert found["error"] == [None, None]
    for step, values in enumerate(found["steps"], start=1):
        assert min(values["versions"]) >= step - 1 - bound
        assert len(values["samples"]) == 9
    assert max(s["metrics"]["staleness/max"][0] for s in found["steps"]) >= 1
    assert sum(found["most"]) <= (bound + 1) * 3 + 2  # of what could be used; shares round up
    balance = read_books(tmp_path / "books.jsonl")
    assert balance.balanced
    assert len(balance.ended["trained"]) == 27
    assert found["counts"]["issued"] == 3 * sum(len(v) for v in balance.ended.values())


@pytest.mark.dist
def test_a_group_that_takes_too_long_expires_and_another_takes_its_place(run: Run) -> None:
    delays = {ORDER[2]: 6}
    found = run(schedule="asynchronous", max_staleness=1, count=5, delays=delays, total=9)
    trained = [serial for step in found["steps"] for serial in serials(step)]
    assert 2 not in trained and len(trained) == 20
    assert found["counts"]["expired"] >= 1


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["synchronous", "one_step_off"])
def test_what_is_trained_does_not_depend_on_what_ends_first(run: Run, schedule: str) -> None:
    pattern = [SOME, NONE, SOME, ALL, SOME, SOME, NONE, SOME, SOME, NONE, SOME, SOME]
    settings = {"schedule": schedule, "max_rounds": 3, "answers": answers(*pattern), "count": 4}
    first = run([0], **settings)
    for seed in (1, 2, 3):
        rng = random.Random(seed)
        delays = {key: rng.choice([0, 1, 2, 5]) for key in ORDER[:12]}
        again = run([0, 1], delays=delays, **settings)
        for a, b in zip(first["steps"], again["steps"], strict=True):
            for key in ("samples", "rewards", "versions", "accuracy"):
                assert a[key] == b[key]
        assert first["stream"] == again["stream"]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.dist
def test_a_group_that_no_server_gives_ends_the_run_on_every_rank(run: Run) -> None:
    found = run([0, 1], answers=EVEN | {ORDER[3]: "HTTP 400: too long"})
    for error in found["error"]:
        assert error.startswith(f"ServerError: prompt {ORDER[3]} (group 3) was not sampled: HTTP")
        assert "on_failure.servers=restart" in error


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["synchronous", "one_step_off", "asynchronous"])
def test_or_is_replaced_and_counted(run: Run, schedule: str, tmp_path: Path) -> None:
    broken = EVEN | {ORDER[3]: "no answer", ORDER[6]: "garbage"}
    found = run([0, 1], answers=broken, schedule=schedule, count=2, tolerant=True)
    trained = [serial for step in found["steps"] for serial in serials(step)]
    assert trained == [0, 1, 2, 4, 5, 7, 8, 9]
    balance = read_books(tmp_path / "books.jsonl")
    assert balance.balanced and balance.ended["failed"] == (3, 6)


@pytest.mark.dist
def test_where_nothing_works_the_run_ends_after_as_many_failures_as_a_step_has_groups(
    run: Run,
) -> None:
    found = run(answers=dict.fromkeys(ORDER, "HTTP 500"), tolerant=True)
    assert "5 groups failed in one step, the last: prompt" in found["error"][1]
    assert found["counts"]["failed"] == 3 * 5


@pytest.mark.dist
def test_a_reward_that_does_not_end_costs_its_group_where_servers_may_not_fail(
    run: Run, tmp_path: Path
) -> None:
    late = "data.reward=r took longer than 1 s (data.reward_timeout_s) on sample p/0"
    found = run([0, 1], answers=EVEN | {ORDER[1]: late}, count=2)
    assert [serials(step) for step in found["steps"]] == [[0, 2, 3, 4], [5, 6, 7, 8]]
    assert found["counts"] == of_three(issued=9, trained=8, failed=1)
    assert late in (tmp_path / "books.jsonl").read_text()
    found = run(answers=dict.fromkeys(ORDER, late), folder=str(tmp_path / "never"))
    assert "5 groups failed in one step, the last: prompt" in found["error"][1]
    assert f"was not scored: {late}" in found["error"][1]


# --- rewards' components --------------------------------------------------------------------------


@pytest.mark.dist
def test_a_collector_in_which_nothing_ended_learns_the_components_from_another(run: Run) -> None:
    cut: list[bool | None] = [None, None, None]
    pattern: list[Any] = [cut, cut, SOME, ALL, *[cut] * 8]
    parts = {key: ("right", "form") for key in ORDER}
    found = run([0, 1], answers=answers(*pattern), count=2, names=parts)
    assert found["names"] == ("right", "form")
    first, second = found["steps"]
    assert first["rewards"] == [[0, 0]] * 6 + [[1, 0.5], [0, 0.5], [0, 0.5]] + [[1, 0.5]] * 3
    assert second["rewards"] == [[0, 0]] * 12  # remembered
    assert first["metrics"]["rollout/reward/right"] == (4.0, 12)
    assert first["metrics"]["rollout/reward/form"] == (3.0, 12)


@pytest.mark.dist
def test_while_nothing_has_ended_there_is_one_component(run: Run) -> None:
    cut: list[bool | None] = [None, None, None]
    found = run([0, 1], answers=dict.fromkeys(ORDER, cut), max_rounds=2)
    assert found["steps"][0]["rewards"] == [[0.0]] * 12
    assert found["names"] == ()


@pytest.mark.dist
def test_collectors_with_different_components_fail_alike_on_every_rank(run: Run) -> None:
    parts = {key: ("a", "b") if i < 2 else ("a", "c") for i, key in enumerate(ORDER[:12])}
    found = run([0, 1], names=parts)
    assert found["error"][0] == found["error"][1]
    assert "of rank 1 have the components a, c; accepted: those" in found["error"][0]
