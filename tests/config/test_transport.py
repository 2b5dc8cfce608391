"""The way of weights to servers: every contradiction, and what has no effect."""

from pathlib import Path

import pytest

from tests.config.cases import Case, assert_exactly

DISK, COLOCATED = "sync.transport=disk", "sync.transport=colocated"
KEY = "rollout.key_file=HERE/key"
SGLANG = ["rollout.engine=sglang", "rollout.server_command=[sh]"]

VALID = [
    Case([DISK], {}),
    Case([DISK, "sync.folder=HERE/weights"], {}),
    Case([DISK, "rollout.discover=true", "sync.folder=HERE/weights"], {}),
    Case([DISK, "rollout.urls=[http://far:1]", KEY], {}),
    Case([COLOCATED], {}),
    Case([COLOCATED, "sync.delta=true"], {}),
    Case([COLOCATED, *SGLANG, "rollout.server_tp=2"], {}),
    Case([COLOCATED, *SGLANG, "rollout={server_tp: 4, server_dp: 2}"], {}),
    Case([*SGLANG, "rollout={server_tp: 4, server_dp: 2}"], {}),
    *(
        Case([COLOCATED, f"rollout.urls=['http://{host}:1']", KEY], {})
        for host in ("127.0.0.1", "localhost", "[::1]", "127.1.2.3")
    ),
    Case(["rollout.release_memory=true"], {}),
    Case(["rollout.release_memory=true", "rollout.over_sampling=1.5", COLOCATED, *SGLANG], {}),
    Case(["rollout.release_memory=false", "rollout.schedule=asynchronous"], {}),
    Case(["sync.folder=null", "sync.backend=gloo"], {}),
]
WRONG = [
    Case([DISK, "sync.folder=HERE/model"], {"sync.folder": ["the folder of model.hf"]}),
    Case([DISK, "rollout.model=HERE/served", "sync.folder=HERE/served"],
         {"sync.folder": ["the folder of rollout.model"], "rollout.model": ["does not exist"]}),
    Case([DISK, "sync.delta=true"], {"sync.delta": ["sync.transport=disk", "whole weights"]}),
    Case([DISK, "sync.folder=HERE/prompts.jsonl/x"],
         {"sync.folder": ["prompts.jsonl is a file", "a folder that servers share"]}),
    Case([COLOCATED, "rollout.discover=true"],
         {"sync.transport": ["rollout.discover", "broadcast or disk"]}),
    *(
        Case([COLOCATED, f"rollout.urls=['http://127.0.0.1:1', 'http://{host}:2']", KEY],
             {"rollout.urls[1]": [host, "sync.transport=colocated", "127.0.0.1"]})
        for host in ("10.0.0.3", "node7", "[2001:db8::1]")
    ),
    *(
        Case(["rollout.release_memory=true", f"rollout.schedule={schedule}"],
             {"rollout.release_memory": [schedule, "servers sample while the trainer trains"]})
        for schedule in ("one_step_off", "asynchronous")
    ),
    Case(["sync.folder=HERE/weights"], {"sync.folder": ["it is of sync.transport=disk"]}),
    *(
        Case([transport, "sync.backend=gloo"],
             {"sync.backend": ["gloo", "it is of sync.transport=broadcast"]})
        for transport in (DISK, COLOCATED)
    ),
    Case([DISK], {"sync.transport": ["disk", "no effect"]}, "sft"),
    Case(["rollout.release_memory=true"], {"rollout.release_memory": ["no effect"]}, "train_only"),
]  # fmt: skip


@pytest.mark.parametrize("case", VALID, ids=str)
def test_it_fits(case: Case, place: Path) -> None:
    assert_exactly(case, place)


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_it_is_refused_with_every_reason(case: Case, place: Path) -> None:
    assert_exactly(case, place)
