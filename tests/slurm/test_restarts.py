"""Launchers that start the trainer again, and the servers that stay meanwhile."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import LOCAL, SCRIPT, Cluster, option

SCRIPTS = pytest.mark.parametrize("script", [SCRIPT, LOCAL], ids=["slurm", "local"])


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def launches(cluster: Cluster) -> list[list[str]]:
    """Arguments of the ranks, a list a start: of several nodes those of one."""
    calls = cluster.calls("torch.distributed.run")
    starts = {option(call, "--rdzv-id"): call for call in calls}
    return [call[call.index("megarl.train") + 1 :] for call in starts.values()]


def option_after(call: list[str], name: str) -> str:
    return call[call.index(name) + 1]


def ids(cluster: Cluster) -> list[str]:
    found = [option(call, "--rdzv-id") for call in cluster.calls("torch.distributed.run")]
    return list(dict.fromkeys(found))


@SCRIPTS
def test_a_trainer_that_fails_goes_on_from_its_checkpoint_and_the_servers_stay(
    cluster: Cluster, script: Path
) -> None:
    code, errors = cluster.submit(
        "c.yaml", "a=b c", script=script, STATUS="1,1,0", RESTARTS="3", SERVERS="1"
    )
    assert code == 0, errors
    found = "rollout.discover=true"
    assert launches(cluster) == [
        ["c.yaml", "a=b c", found],
        ["c.yaml", "a=b c", found, "run.resume=true"],
        ["c.yaml", "a=b c", found, "run.resume=true"],
    ]
    first, *others = ids(cluster)
    assert others == [f"{first}-r1", f"{first}-r2"]
    served = [c for c in cluster.calls("servers") if "servers" in c]
    assert len(served) == 1 and served[0][-2:] == ["c.yaml", "a=b c"]  # no discovery for them
    assert option(served[0], "--parent-pid").isdecimal()
    assert len(cluster.calls("servers ended")) == 1
    assert "restart 1 of 3 of the trainer in 1 s run.resume=true\n" in errors
    assert "restart 2 of 3 of the trainer in 2 s run.resume=true\n" in errors
    assert cluster.calls("sleep") == [["sleep", "1"]] * 3
    failed = [option_after(call, "--launch") for call in cluster.calls("go-on")]
    assert failed == [first, f"{first}-r1"]


@SCRIPTS
def test_after_the_last_restart_the_run_has_failed_and_nothing_remains(
    cluster: Cluster, script: Path
) -> None:
    code, errors = cluster.submit(
        "c.yaml", script=script, STATUS="1", RESTARTS="2", SERVERS="1", GO_ON=""
    )
    assert code == 1 and len(ids(cluster)) == 3
    assert all("run.resume=true" not in call for call in launches(cluster))  # no checkpoint
    assert len(cluster.calls("first-error")) == 3 and str(cluster.run_dir) in errors
    assert len(cluster.calls("servers ended")) == 1


@pytest.mark.slow
@SCRIPTS
def test_every_restart_waits_longer_than_the_one_before_up_to_a_minute(
    cluster: Cluster, script: Path
) -> None:
    code, errors = cluster.submit("c.yaml", script=script, STATUS="1", RESTARTS="8")
    assert code == 1
    assert re.findall(r"in (\d+) s", errors) == ["1", "2", "4", "8", "16", "32", "60", "60"]
    assert cluster.calls("sleep") == [["sleep", "1"]] * (1 + 2 + 4 + 8 + 16 + 32 + 60 + 60)


@SCRIPTS
def test_what_a_restart_does_not_mend_is_not_started_again(cluster: Cluster, script: Path) -> None:
    code, errors = cluster.submit(
        *["c.yaml"], script=script, STATUS="1", RESTARTS="5", SERVERS="1", GO_ON_FAILS="1"
    )
    assert code == 1 and len(ids(cluster)) == 1 and "not started again" in errors
    assert cluster.calls("sleep") == [] and len(cluster.calls("servers ended")) == 1


@SCRIPTS
def test_a_stop_between_two_starts_is_the_end(cluster: Cluster, script: Path) -> None:
    job = cluster.start(
        *["c.yaml"], script=script, STATUS="1", RESTARTS="5", SERVERS="1", SECONDS_OF_SLEEP="0.5"
    )
    while not cluster.calls("sleep"):
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 128 + signal.SIGTERM
    assert len(ids(cluster)) == 1 and len(cluster.calls("servers ended")) == 1


@SCRIPTS
def test_without_restarts_nothing_is_started_again_nor_served(
    cluster: Cluster, script: Path
) -> None:
    code, _ = cluster.submit("c.yaml", script=script, STATUS="1")
    assert code == 1 and launches(cluster) == [["c.yaml"]] and not cluster.calls("servers")


@pytest.mark.parametrize(
    "script, number",
    [
        (SCRIPT, signal.SIGTERM),
        (SCRIPT, signal.SIGUSR1),
        (LOCAL, signal.SIGTERM),
        (LOCAL, signal.SIGINT),
    ],
)
def test_a_stop_is_no_failure_that_restarts(
    cluster: Cluster, script: Path, number: signal.Signals
) -> None:
    job = cluster.start(
        *["c.yaml"], script=script, STATUS="1", RESTARTS="5", SERVERS="1", SECONDS_OF_TRAINING="1"
    )
    while not (cluster.calls("torch.distributed.run") and cluster.calls("servers")):
        time.sleep(0.05)
    job.send_signal(number)
    assert job.wait(20) == 128 + number
    assert len(ids(cluster)) == 1 and len(cluster.calls("servers ended")) == 1


@SCRIPTS
def test_a_trainer_is_not_started_again_when_the_servers_have_ended(
    cluster: Cluster, script: Path
) -> None:
    code, errors = cluster.submit(
        *["c.yaml"], script=script, STATUS="1", RESTARTS="5", SERVERS="1",
        SECONDS_OF_SERVING="0.2", SECONDS_OF_TRAINING="1",
    )  # fmt: skip
    assert code == 1 and "the rollout servers have ended" in errors and len(ids(cluster)) == 1
