"""Servers that die, hang or are given up: noticed, ended, started again, and counted."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megarl.errors import ServerError
from megarl.rollout import keeper, watching
from megarl.rollout.process import lives
from megarl.rollout.starter import free_port
from megarl.rollout.watching import Hold
from tests.rollout.fleets import Site, back, until


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(keeper, "_BACK_OFF_S", (0.1, 0.4))
    monkeypatch.setattr(watching, "GENEROUS", 1)
    return Site(tmp_path)


def test_several_servers_are_started_and_one_that_dies_is_started_again(site: Site) -> None:
    with site.fleet(servers=3) as fleet:
        before = fleet.members()
        assert [m.name for m in before] == ["server 0", "server 1", "server 2"]
        assert len({m.url for m in before}) == len({m.boot for m in before}) == 3
        assert {m.version for m in before} == {"sglang 0.5.23"}
        os.kill(fleet.managed[1].process.pid, signal.SIGKILL)
        until(lambda: len(fleet.members()) == 2, 2)  # at once, without a probe
        assert not site.run.server(1).exists() or fleet.events.get("restarts") == 1
        again = back(fleet, before[1])
        assert [m.name for m in fleet.members()] == ["server 0", "server 1", "server 2"]
        assert [fleet.members()[i] for i in (0, 2)] == [before[0], before[2]]
        assert again.boot in site.run.server(1).read_text()
        assert fleet.events == {"died": 1, "restarts": 1}
        log = (site.run.logs / "server_1.log").read_text()
        assert log.count("listening") == 2 and ": restart 1\n" in log  # appended, with a mark
        assert site.deaths == [] and fleet.trouble() is None


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("hang", "refuse")), "SIGSTOP"]
)
def test_a_server_that_lives_and_does_no_work_is_ended_and_started_again(
    site: Site, how: str
) -> None:
    """Its process is there all the time, and `/health` would say 200."""
    with site.fleet(probe_timeout_s=0.4) as fleet:
        (old,) = fleet.members()
        pid = fleet.managed[0].process.pid
        if how == "SIGSTOP":
            os.killpg(pid, signal.SIGSTOP)
        else:
            site.tell(how)
        until(lambda: fleet.events.get("hung"))
        until(lambda: not lives(pid))  # it is counted first
        if how != "SIGSTOP":
            site.take_back(how)
        assert back(fleet, old).url and site.deaths == []


@pytest.mark.slow
def test_a_server_that_was_left_paused_goes_on_unless_somebody_pushes(site: Site) -> None:
    """It lacks nothing; but who lets a server go on in a push has it sample from mixed weights."""
    asked, paused = site.program.parent / "calls", site.program.parent / "paused"
    pushing = threading.Event()
    with site.fleet(
        probe_timeout_s=0.25, hold=Hold(lambda: nullcontext(not pushing.is_set()))
    ) as fleet:
        (old,) = fleet.members()
        with fleet.hold():
            site.tell("paused")
            time.sleep(0.8)
            assert paused.exists()
        until(lambda: not paused.exists())  # by the keeper, after one probe without an answer
        time.sleep(0.7)
        assert fleet.members() == [old] and fleet.events == {}
        asked.write_text("")
        pushing.set()  # in another process, whose pause this is
        site.tell("paused")
        until(lambda: fleet.events.get("hung"))
        assert paused.exists() and "/continue_generation" not in asked.read_text()
        site.take_back("paused")
        assert back(fleet, old)


def test_a_suspect_must_generate_a_token(site: Site) -> None:
    """Its scheduler answers every health check, and no request."""
    with site.fleet(probe_timeout_s=0.4) as fleet:
        (old,) = fleet.members()
        site.tell("hang_generate")
        time.sleep(0.5)
        assert fleet.members() == [old]  # nobody has said anything against it
        fleet.suspect(old, "two requests had no answer")
        until(lambda: fleet.events.get("hung"))
        site.take_back("hang_generate")
        assert back(fleet, old)


@pytest.mark.parametrize(
    "garbage",
    [
        {"output_ids": "three"},
        {"output_ids": [3, 3]},
        {"output_ids": [-3]},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[None, 3, None]]},
        {"output_token_logprobs": [[0.5, 3, None]]},
        {"output_token_logprobs": [[-0.5, 4, None]]},
        {"id": "somebody-else"},
        {"finish_reason": "tired"},
    ],
    ids=str,
)
def test_a_suspect_whose_answers_are_garbage_is_started_again_however_busy(
    site: Site, garbage: dict[str, Any]
) -> None:
    with site.fleet() as fleet:
        (old,) = fleet.members()
        site.tell("busy")
        fleet.suspect(old, "a wrong answer")
        time.sleep(0.8)
        assert fleet.members() == [old] and fleet.events == {}  # its answers are fine
        site.tell("response.json", json.dumps(garbage))
        fleet.suspect(old, "a wrong answer")
        until(lambda: fleet.events.get("garbled"))
        assert fleet.members() == []
        site.take_back("response.json")
        assert back(fleet, old) and fleet.events == {"garbled": 1, "restarts": 1}


def test_a_busy_server_is_not_taken_for_a_hung_one(site: Site) -> None:
    """A probe waits behind the others' requests, which get their tokens."""
    with site.fleet(probe_timeout_s=0.4) as fleet:
        (member,) = fleet.members()
        site.tell("busy")
        site.tell("hang")
        fleet.suspect(member, "a request took long")
        time.sleep(1.8)  # two probes would have failed
        assert fleet.members() == [member] and fleet.events == {}
        site.take_back("busy")  # and now nobody gets any
        until(lambda: fleet.events.get("hung"))
        site.take_back("hang")


def test_under_stop_a_hung_server_is_ended_and_reported(site: Site) -> None:
    with site.fleet(restarts=None, probe_timeout_s=0.4) as fleet:
        pid = fleet.managed[0].process.pid
        site.tell("hang")
        (death,) = until(lambda: site.deaths)
        assert death.name == "server 0" and "hangs" in death.cause and "listening" in death.cause
        assert not lives(pid) and fleet.members() == [] and "hangs" in str(fleet.trouble())
        time.sleep(0.5)
        assert len(site.deaths) == 1 and fleet.events == {"hung": 1}


def test_servers_that_hang_are_ended_together(site: Site) -> None:
    with site.fleet(servers=3) as fleet:
        pids = [server.process.pid for server in fleet.managed]
        for pid in pids:
            os.killpg(pid, signal.SIGSTOP)  # none heeds a SIGTERM any more
        start = time.monotonic()
        fleet.close()
        assert not any(map(lives, pids)) and time.monotonic() - start < 6.0


@pytest.mark.slow  # test_fleet_found.py has it for discovered servers
def test_nobody_is_probed_inside_a_hold(site: Site) -> None:
    with site.fleet(probe_timeout_s=0.7) as fleet:
        members = fleet.members()
        with fleet.hold():
            site.tell("hang")
            time.sleep(2.2)  # longer than two probes take
            site.take_back("hang")
        time.sleep(0.5)
        assert fleet.members() == members and fleet.events == {}


def test_a_server_that_was_given_up_comes_back_as_another(site: Site) -> None:
    with site.fleet() as fleet:
        (old,) = fleet.members()
        pid = fleet.managed[0].process.pid
        fleet.give_up(old, "its weights are broken")
        assert fleet.members() == []  # from now on
        assert back(fleet, old) and not lives(pid) and fleet.events["given_up"] == 1
        fleet.give_up(old, "told late")  # of a process that is gone
        time.sleep(0.3)
        assert len(fleet.members()) == 1 and fleet.events["restarts"] == 1


def test_after_the_last_restart_it_is_said_what_each_died_of(site: Site) -> None:
    with site.fleet(servers=2, restarts=2) as fleet:
        site.tell("fail")
        for server in fleet.managed:
            assert fleet.trouble() is None
            os.kill(server.process.pid, signal.SIGKILL)
        trouble = until(fleet.trouble, 20)
        for name in ("server 0", "server 1"):
            assert f"{name}: {name} did not start: exit code 7" in trouble
        assert trouble.count("cannot start today") == 2 and site.deaths == []
        assert fleet.events == {"died": 2, "restarts": 4} and fleet.members() == []


def test_one_of_several_that_does_not_start_does_not_keep_the_others(site: Site) -> None:
    port = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port + 1)):
        with site.fleet(servers=2, port=port, restarts=1) as fleet:
            until(lambda: fleet.events.get("restarts"))
            assert [m.name for m in fleet.members()] == ["server 0"] and fleet.trouble() is None
        with (
            pytest.raises(ServerError, match="server 1 did not start"),
            site.fleet(servers=2, port=port, restarts=None),
        ):
            pass


def test_a_file_system_that_stumbles_ends_no_keeper(site: Site) -> None:
    with site.fleet() as fleet:
        (old,) = fleet.members()
        file = site.run.server(0)
        file.unlink()
        file.mkdir()  # it can be neither read nor removed
        os.kill(fleet.managed[0].process.pid, signal.SIGKILL)
        until(lambda: fleet.events.get("restarts"))
        file.rmdir()
        assert back(fleet, old).url and site.deaths == []
