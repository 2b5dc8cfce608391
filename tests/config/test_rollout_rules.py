"""Rollouts: every contradiction among servers, schedules, determinism and failures."""

from pathlib import Path

import pytest

from megarl.config.failures import on_failure
from megarl.config.load import load_config
from megarl.config.rollout import OnFailureSection
from megarl.config.unused import unused_settings
from megarl.errors import ConfigError
from tests.config.cases import MOE, Case, assert_exactly, base, found_problems

URLS = ["rollout.urls=[http://a:1]", "rollout.key_file=HERE/key"]
SGLANG = ["rollout.engine=sglang", "rollout.server_command=[sh]"]
DETERMINISTIC = ["rollout.deterministic=true"]
ASYNCHRONOUS = "rollout.schedule=asynchronous"
R3 = "moe.routing_replay=rollout"

VALID = [
    Case(["rollout.servers=8", "rollout.port=30000"], {}),
    Case([*SGLANG, "rollout={server_tp: 8, server_ep: 4, server_dp: 2}"], {}),
    Case([*SGLANG, "rollout={server_tp: 4, server_ep: 4, server_dp: 4}"], {}),
    Case([*SGLANG, "rollout.router_command=[sh, -m, r, --policy, round_robin]"], {}),
    Case(["rollout.discover=true", "rollout.servers=2"], {}),
    Case(["rollout.discover=true", "on_failure.servers=restart"], {}),
    Case([*URLS, "on_failure.servers=stop"], {}),
    Case(["rollout.schedule=one_step_off"], {}),
    Case(["rollout.schedule=asynchronous", "rollout.max_staleness=1"], {}),
    Case(["rollout.schedule=asynchronous", "rollout.pause_mode=in_place"], {}),
    Case(["rollout.max_staleness=0"], {}),
    Case(["rollout.over_sampling=1.5", "rollout.max_staleness=3"], {}),
    Case([*DETERMINISTIC], {}),
    Case([*DETERMINISTIC, "rollout={schedule: one_step_off, max_in_flight: 8, servers: 3}"], {}),
    *(
        Case([f"rollout={{over_sampling: 1.5, partial: {partial}}}", schedule], {})
        for schedule in ("rollout.schedule=synchronous", "rollout.schedule=one_step_off")
        for partial in ("continue", "restart", "discard")
    ),
    Case([ASYNCHRONOUS, "rollout={pause_mode: abort, partial: discard}"], {}),
    Case([ASYNCHRONOUS, "rollout.mask_continued=true"], {}),
    Case([ASYNCHRONOUS, "rollout={mask_continued: true, pause_mode: in_place}"], {}),
    Case([ASYNCHRONOUS, "rollout={mask_continued: true, pause_mode: abort}"], {}),
    Case(["rollout={over_sampling: 1.5, mask_continued: true}"], {}),
    Case(["rollout={schedule: one_step_off, over_sampling: 1.5, mask_continued: true}"], {}),
    Case(["rollout.max_in_flight=8", "data.samples_per_prompt=8"], {}),
    Case([R3, ASYNCHRONOUS], {}),
    *(
        Case([R3, *servers, f"rollout={{schedule: asynchronous, pause_mode: {mode}}}"], {})
        for servers in (SGLANG, URLS, ["rollout.discover=true"])
        for mode in ("abort", "in_place")
    ),
    *(
        Case([R3, *servers, f"rollout.schedule={schedule}"], {})
        for servers in (SGLANG, URLS, ["rollout.discover=true"])
        for schedule in ("synchronous", "one_step_off")
    ),
    Case(["on_failure={servers: restart, max_restarts: 1}"], {}),
    Case(["on_failure={servers: stop, max_restarts: 0}"], {}),
    Case(["on_failure.trainer=restart"], {}, "sft"),
]
WRONG = [
    Case(["rollout.servers=8", "rollout.port=65530"],
         {"rollout.port": ["65530 for 8 servers", "up to 65535"]}),
    Case([*URLS, "rollout.discover=true"], {"rollout.discover": ["rollout.urls", "not both"]}),
    Case(["rollout.discover=true", "on_failure.servers=stop"],
         {"on_failure.servers": ["stop with rollout.discover", "restart, or null"]}),
    *(
        Case([*SGLANG, f"rollout={{server_tp: {tp}, {key}: {value}}}"],
             {f"rollout.{key}": [f"{value} |", f"a divisor of rollout.server_tp = {tp}"]})
        for tp, key, value in (
            (1, "server_ep", 2), (4, "server_ep", 3), (2, "server_dp", 4), (6, "server_dp", 4),
        )
    ),
    Case([*SGLANG, "rollout={server_tp: 6, server_ep: 3}"],
         {"rollout.server_ep": ["3 |", "the model's 8 experts"]}),
    Case([*SGLANG, "rollout.router_command=[sh, run]"],
         {"rollout.router_command": ["[sh, run]", "[PROGRAM, -m, MODULE"]}),
    Case([*SGLANG, "rollout.router_command=[sh, -c, run]"],
         {"rollout.router_command": ["[sh, -c, run]", "sglang_router.launch_router"]}),
    Case(["rollout.router_command=[sh, -m, sglang_router.launch_router]"],
         {"rollout.engine": ["embedded |", "without a key"]}),
    Case([*SGLANG, "rollout.router_command=[sh, -m, r]", "moe.routing_replay=rollout"],
         {"moe.routing_replay": ["rollout |", "drops routed experts"]}),
    *(
        Case([f"rollout={{schedule: {schedule}, max_staleness: 0}}"],
             {"rollout.max_staleness": ["0 |", "at least 1", schedule]})
        for schedule in ("one_step_off", "asynchronous")
    ),
    Case(["rollout={request_timeout_s: 20}"],
         {"rollout.request_timeout_s": ["20 |", "rollout.probe_timeout_s = 30"]}),
    Case(["rollout={request_timeout_s: 90, probe_timeout_s: 100}"],
         {"rollout.request_timeout_s": ["90 |", "rollout.probe_timeout_s = 100"]}),
    *(
        Case([R3, *servers, ASYNCHRONOUS, *given],
             {"rollout.pause_mode": ["retract with moe.routing_replay", "in_place or abort"]})
        for servers in (SGLANG, URLS, ["rollout.discover=true"])
        for given in ([], ["rollout.pause_mode=retract"])
    ),
    *(
        Case([f"rollout.max_in_flight={most}", f"data.samples_per_prompt={samples}"],
             {"rollout.max_in_flight": [f"{most} |", f"data.samples_per_prompt = {samples}"]})
        for most, samples in ((1, 2), (7, 8), (2, 16))
    ),
    Case(["rollout.max_in_flight=8", "eval.every=1", "eval.sets=["
          "{name: a, prompts: HERE/heldout.jsonl, samples_per_prompt: 8, temperature: 1},"
          "{name: b, prompts: HERE/heldout.jsonl, samples_per_prompt: 9, temperature: 1}]"],
         {"rollout.max_in_flight": ["8 |", "eval.sets[1].samples_per_prompt = 9"]}),
    *(
        Case([*DETERMINISTIC, *given], {f"rollout.{key}": ["with rollout.deterministic", accepted]})
        for given, key, accepted in (
            (SGLANG, "engine", "embedded: SGLang's bits"),
            (URLS, "urls", "none: "),
            (["rollout.discover=true"], "discover", "false: "),
            (["rollout.fixed_shape=false"], "fixed_shape", "true: "),
            (["rollout.schedule=asynchronous"], "schedule", "synchronous or one_step_off"),
            (["rollout.over_sampling=1.25"], "over_sampling", "1.0: "),
        )
    ),
    *(
        Case([f"on_failure={{{part}: restart, max_restarts: 0}}"],
             {f"on_failure.{part}": ["no restarts", "on_failure.max_restarts"]})
        for part in ("servers", "collectors", "trainer")
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", [*VALID, *WRONG], ids=str)
def test_a_contradiction_alone_gives_exactly_its_problem(case: Case, place: Path) -> None:
    assert_exactly(case, place)


def test_all_contradictions_are_told_together(place: Path) -> None:
    given = [
        *("rollout.deterministic=true", "rollout.schedule=asynchronous", "rollout.max_staleness=0"),
        *("rollout.over_sampling=2", "rollout.fixed_shape=false", "rollout.request_timeout_s=1"),
        *("rollout.discover=true", "on_failure.servers=stop"),
    ]
    keys = {key for key, _ in found_problems(Case(given, {}), place)}
    assert keys >= {
        *("rollout.schedule", "rollout.max_staleness", "rollout.over_sampling", "rollout.discover"),
        *("rollout.fixed_shape", "rollout.request_timeout_s", "on_failure.servers"),
    }


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_sampling_that_would_falsify_log_probs_says_why_there_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.{name}: .*another.* than the trainer's"):
        load_config([], [*base(Path("/p"), "rl"), f"rollout.{name}=1"])


@pytest.mark.parametrize(
    "given, key, words",
    [
        ([*URLS, "rollout.servers=2"], "rollout.servers", "already run"),
        ([*URLS, "rollout.server_ep=2"], "rollout.server_ep", "already run"),
        ([*URLS, "rollout.server_dp=2"], "rollout.server_dp", "already run"),
        ([*URLS, "rollout.router_command=[a]"], "rollout.router_command", "already run"),
        (["rollout.server_ep=2"], "rollout.server_ep", "engine=embedded"),
        (["rollout.server_dp=2"], "rollout.server_dp", "engine=embedded"),
        (["rollout.pause_mode=abort"], "rollout.pause_mode", "schedule=asynchronous"),
        (
            ["rollout.schedule=one_step_off", "rollout.pause_mode=in_place"],
            "rollout.pause_mode",
            "schedule=asynchronous",
        ),
        *(
            ([f"rollout.schedule={schedule}", given, f"rollout.partial={partial}"], *told)
            for schedule, given in (
                ("synchronous", "rollout.servers=2"),
                ("one_step_off", "rollout.servers=2"),
                ("asynchronous", "rollout.pause_mode=retract"),
                ("asynchronous", "rollout.pause_mode=in_place"),
                ("asynchronous", "rollout.over_sampling=2"),
            )
            for partial in ("continue", "restart", "discard")
            for told in [("rollout.partial", "no response is stopped half-way")]
        ),
        *(
            ([f"rollout={{mask_continued: true, {given}}}"], *told)
            for given in (
                "servers: 2",
                "schedule: one_step_off",
                "over_sampling: 2, partial: restart",
                "over_sampling: 2, partial: discard",
                "over_sampling: 2, max_staleness: 0",
                "over_sampling: 2, schedule: one_step_off, max_staleness: 1",
                "schedule: asynchronous, pause_mode: abort, partial: restart",
            )
            for told in [("rollout.mask_continued", "no response of several weights")]
        ),
        (["rollout.max_staleness=2"], "rollout.max_staleness", "what it has sampled itself"),
        (
            ["on_failure={servers: stop, collectors: stop, trainer: stop, max_restarts: 3}"],
            "on_failure.max_restarts",
            "stop for all",
        ),
    ],
)
def test_settings_without_effect_are_named(given: list[str], key: str, words: str) -> None:
    config = load_config([], [*base(Path("/p"), "rl"), *given])
    (problem,) = unused_settings(config, MOE["num_experts"])
    assert problem.key == key and words in problem.found + problem.accepted


@pytest.mark.parametrize("mode", ["sft", "train_only"])
def test_without_rollouts_only_the_trainer_can_fail(mode: str) -> None:
    given = ["on_failure={servers: restart, collectors: stop, trainer: restart}"]
    config = load_config([], [*base(Path("/p"), mode), *given])
    found = {problem.key for problem in unused_settings(config, 8)}
    assert found == {"on_failure.servers", "on_failure.collectors"}


def test_failures_restart_inside_an_allocation_unless_told_otherwise() -> None:
    null, slurm = OnFailureSection(), {"SLURM_JOB_ID": "17"}
    for part in ("servers", "collectors", "trainer"):
        assert on_failure(null, part, {}) == on_failure(null, part, {"SLURM_JOB_ID": ""}) == "stop"
        assert on_failure(null, part, slurm) == "restart"
        for choice in ("stop", "restart"):
            given = OnFailureSection.model_validate({part: choice})
            assert on_failure(given, part, {}) == on_failure(given, part, slurm) == choice
