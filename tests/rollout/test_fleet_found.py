"""Servers that run by themselves: named in rollout.urls, or started by `megarl servers`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl import __version__
from megarl.errors import ServerError, UnfitServerError
from megarl.rollout import discovery, keeper
from megarl.rollout.fleet import Fleet
from megarl.rollout.process import lives, read_or_make_key
from megarl.types import Member
from tests.config.cases import MOE
from tests.rollout.fleets import HOLDS, Site, back, until

PORT = iter(range(18400, 18500))


class External:
    """A server that somebody else has started, at one address for good."""

    def __init__(self, site: Site) -> None:
        self.site, self.port = site, next(PORT)
        self.url = f"http://127.0.0.1:{self.port}"
        self.key_file = site.program.parent / "external.key"
        key = read_or_make_key(self.key_file)
        self.config = site.program.parent / "external.yaml"
        self.config.write_text(json.dumps({"api-key": key}))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(self.site.program), "--config", str(self.config)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command)

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    def end(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def fleet(self, restarts: int | None = 3, **changes: object) -> object:
        return self.site.fleet(
            restarts=restarts, urls=(self.url,), key_file=self.key_file, **changes
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(keeper, "_BACK_OFF_S", (0.1, 0.4))
    monkeypatch.setattr(discovery, "_EVERY_S", 0.2)
    return Site(tmp_path)


@pytest.fixture
def external(site: Site) -> Iterator[External]:
    server = External(site)
    yield server
    server.end()


def only(fleet: Fleet) -> Member:
    (member,) = fleet.members()
    return member


def test_a_named_server_is_a_member_while_it_answers(external: External) -> None:
    with external.fleet(probe_timeout_s=0.7) as fleet:
        old = only(fleet)
        assert old.name == old.url == external.url
        external.end()
        until(lambda: fleet.members() == [])
        assert fleet.trouble() is None and external.site.deaths == []
        external.start()
        assert back(fleet, old).url == external.url
        assert fleet.events.get("restarts") is None  # nothing of ours


@pytest.mark.parametrize("marked", [True, False])
def test_a_named_server_that_was_restarted_between_two_probes_is_another(
    external: External, marked: bool
) -> None:
    """By what `/server_info` says of its start, else by weights that went back."""
    if not marked:
        external.site.tell("info.json", json.dumps({"startup_time": None, "weight_version": "7"}))
    with external.fleet(probe_every_s=0.4) as fleet:
        old = only(fleet)
        time.sleep(0.5)
        assert only(fleet) == old
        if marked:
            with fleet.hold():  # nobody asks meanwhile, however long it takes
                external.end()
                external.start()
                until(external.listens)
        else:
            told = {"startup_time": None, "weight_version": "0"}
            external.site.tell("info.json", json.dumps(told))
        assert back(fleet, old) and fleet.events.get("hung") is None


@pytest.mark.parametrize("before, pushed", [("7", 4), ("default", 0)])
def test_weights_that_our_trainer_pushed_are_no_sign_of_another_process(
    external: External, before: str, pushed: int
) -> None:
    """Also those of an older step, after a resume; what it has not pushed is."""
    info = {"startup_time": None, "weight_version": before}
    external.site.tell("info.json", json.dumps(info))
    with external.fleet() as fleet:
        old = only(fleet)
        with fleet.hold():
            info["weight_version"] = str(pushed)
            external.site.tell("info.json", json.dumps(info))
            fleet.pushed([old], pushed)
        time.sleep(0.5)
        assert only(fleet) == old and fleet.events == {}
        info["weight_version"] = "default"  # as a new process has
        external.site.tell("info.json", json.dumps(info))
        assert back(fleet, old) and fleet.events == {"replaced": 1}


def test_under_stop_a_named_server_that_fails_ends_the_run(external: External) -> None:
    with external.fleet(restarts=None) as fleet:
        external.end()
        (death,) = until(lambda: external.site.deaths)
        assert death.name == external.url and fleet.members() == []


def test_a_version_that_nobody_has_tried_is_refused_at_the_start(external: External) -> None:
    for version in ("0.4.9.post2", "0.6.0"):
        external.site.tell("info.json", json.dumps({"version": version}))
        with (
            pytest.raises(UnfitServerError, match=r"sglang .*supported: .*sglang 0.5.21 to 0.5.23"),
            external.fleet(start_timeout_s=60),  # and nobody waits for it to become another
        ):
            pass


def test_an_older_version_is_asked_by_older_names(external: External) -> None:
    external.site.tell("old")
    external.site.tell("info.json", json.dumps({"version": "0.5.21"}))
    with external.fleet() as fleet:
        assert only(fleet).version == "sglang 0.5.21"


@pytest.mark.parametrize(
    "states, found",
    [
        ([], "nothing"),
        ([{}], "nothing"),
        ([{"megarl_plugin": "0.2.0"}], "version 0.2.0"),
        ([{"megarl_plugin": "0.3.0 without end_weight_update"}], "version 0.3.0 without end_"),
        ([{"megarl_plugin": "0.3.0"}, {}], "version 0.3.0 and none"),  # one of two schedulers
    ],
)
def test_a_server_without_our_plugin_or_with_another_is_refused_and_told_how_to_get_it(
    external: External, states: list[dict[str, str]], found: str
) -> None:
    """One that we started, too, though it gets the plugin: it may run in another environment."""
    external.site.tell("info.json", json.dumps({"internal_states": states}))
    words = rf"found {found}.*; accepted: version 0\.3\.0\..*`pip install .*sync/sglang_plugin`"
    managed = external.site.fleet(start_timeout_s=60)
    named = external.fleet(start_timeout_s=60)
    for name, fleet in (("server 0 cannot be used", managed), (external.url, named)):
        with pytest.raises(UnfitServerError, match=f"{name}: .*{words}"), fleet:
            pass


def test_a_server_of_other_ranks_than_the_settings_say_is_refused(external: External) -> None:
    external.site.tell("info.json", json.dumps({"tp_size": 4}))
    with (
        pytest.raises(UnfitServerError, match=r"rollout\.server_tp: found 2; accepted: 4"),
        external.fleet(start_timeout_s=60, server_tp=2),
    ):
        pass
    with external.fleet(server_tp=4) as fleet:
        assert only(fleet).ranks == 4


@pytest.mark.parametrize(
    "info, longest",
    [
        ({"max_req_input_len": 93, "context_length": 4096}, 93),  # no room for more keys and values
        ({"context_length": 4096}, 4090),
        ({"max_req_input_len": None, "context_length": None}, None),  # it does not say
        ({"engine": "megarl-embedded", "version": __version__, "context_length": 64}, 64),
    ],
)
def test_a_server_that_cuts_the_longest_sequences_short_is_refused(
    external: External, info: dict[str, object], longest: int | None
) -> None:
    external.site.tell("info.json", json.dumps(info))
    with external.fleet(context_length=longest or 100_000) as fleet:
        assert only(fleet)
    if longest is None:
        return
    wanted = longest + 1
    words = (
        rf"rollout\.context_length: found {wanted}; accepted: at most {longest}, "
        rf".*--context-length {wanted + 6} .*--context-length {wanted}\)"
    )
    managed = external.site.fleet(start_timeout_s=60, context_length=wanted)
    named = external.fleet(start_timeout_s=60, context_length=wanted)
    for name, fleet in (("server 0 cannot be used", managed), (external.url, named)):
        with pytest.raises(UnfitServerError, match=f"{name}: {words}"), fleet:
            pass


def test_a_named_server_that_was_left_paused_or_half_updated_is_taken(external: External) -> None:
    """By a trainer that was killed: it does nothing until it is let go on, or pushed to."""
    external.site.tell("paused")
    with external.fleet(probe_timeout_s=0.4) as fleet:
        assert only(fleet) and not (external.site.program.parent / "paused").exists()
    external.site.tell("refuse")
    external.site.tell("info.json", json.dumps({"unusable": "a weight update failed"}))
    with external.fleet(probe_timeout_s=0.4) as fleet:
        assert only(fleet)


def test_a_named_server_that_was_given_up_gets_another_chance_as_another(
    external: External,
) -> None:
    with external.fleet() as fleet:
        old = only(fleet)
        fleet.give_up(old, "it does not hold the weights that were sent")
        assert fleet.members() == [] and back(fleet, old)
        assert fleet.events == {"given_up": 1}


@contextmanager
def supervisor(site: Site, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """`megarl servers` of the stand-in, which reads no model."""
    model = site.program.parent / "model"
    (model / "megatron").mkdir(parents=True, exist_ok=True)
    site.run.root.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MOE))
    (model / "tokenizer.json").write_text("{}")
    (model / "prompts.jsonl").write_text('{"id": "a", "prompt": "b"}\n')
    settings = [
        *(f"run.dir={site.run.root}", "run.steps=1", f"model.hf={model}", "optim.lr=1e-4"),
        *(f"model.load={model}", "algo.policy.name=gspo", f"data.prompts={model}/prompts.jsonl"),
        *("rollout.engine=sglang", f"rollout.server_command=[{sys.executable}, {site.program}]"),
        *("rollout.probe_every_s=0.1", "rollout.discover=true"),
    ]
    command = [sys.executable, "-m", "megarl.cli", "servers", *settings, *overrides]
    log = site.run.root / "supervisor.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stderr=output, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        assert process.wait(20) is not None


def told(site: Site) -> dict[str, dict[str, object]]:
    return {f.stem: json.loads(f.read_text()) for f in site.run.root.glob("server_*.json")}


def test_servers_of_a_supervisor_are_found_restarted_and_outlive_a_trainer(
    site: Site,
) -> None:
    host = os.uname().nodename
    with supervisor(site, "rollout.servers=2", "rollout.probe_timeout_s=0.7") as process:
        with site.fleet(discover=True, probe_timeout_s=0.7, start_timeout_s=60) as fleet:
            until(lambda: len(fleet.members()) == 2)
            members = fleet.members()
            with fleet.hold():  # nobody probes, the supervisor neither
                time.sleep(1.0)  # it looks every half second
                site.tell("hang")
                time.sleep(2.2)
                site.take_back("hang")
            assert fleet.members() == members
            assert {m.name for m in members} == {f"server {host}-0", f"server {host}-1"}
            pids = {name: int(str(entry["pid"])) for name, entry in told(site).items()}
            assert set(pids) == {f"server_{host}-0", f"server_{host}-1"}
            os.kill(pids[f"server_{host}-0"], signal.SIGKILL)
            old = next(m for m in members if m.name.endswith("-0"))
            new = back(fleet, old)
            assert new.boot == told(site)[f"server_{host}-0"]["boot"]
            other = next(m for m in members if m != old)
            assert other in fleet.members()

            fleet.give_up(other, "half of a weight")  # the supervisor starts another
            back(fleet, other)
            until(lambda: not lives(pids[f"server_{host}-1"]))
            assert (
                "given up: a trainer asked for it: half of a weight"
                in (site.run.root / "supervisor.log").read_text()
            )
        alive = [int(str(entry["pid"])) for entry in told(site).values()]
        assert len(alive) == 2 and all(map(lives, alive))  # the trainer's fleet is closed
        process.terminate()
        assert process.wait(10) == 0
        assert not any(map(lives, alive)) and told(site) == {}


def test_files_that_tell_of_nobody_are_ignored_with_one_warning(
    site: Site, external: External, caplog: pytest.LogCaptureFixture
) -> None:
    root = site.run.root
    root.mkdir(parents=True)
    good = {"url": external.url, "boot": "b1", "ranks": 1}
    (root / "server_a.json").write_text(json.dumps(good))
    (root / "server_b.json").write_text(json.dumps(good | {"url": "http://127.0.0.1:9"}))
    (root / "server_c.json").write_text("{")
    (root / "server_d.json").write_text(json.dumps(good | {"ranks": "2"}))
    (root / "server_e.json").write_text("[1]")
    site.run.key.write_bytes(external.key_file.read_bytes())
    site.run.key.chmod(0o600)
    with site.fleet(discover=True) as fleet:
        member = only(fleet)
        assert (member.name, member.boot) == ("server a", "b1")
        time.sleep(0.8)
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        for name in "cde":
            assert len([w for w in warnings if f"server_{name}.json" in w]) == 1
        assert len([w for w in warnings if "server b" in w]) == 1
        (root / "server_a.json").write_text(json.dumps(good | {"boot": "b2"}))
        assert back(fleet, member).boot == "b2"
        (root / "server_a.json").unlink()
        until(lambda: fleet.members() == [])
        assert fleet.trouble() is None


def test_without_a_supervisor_the_start_says_what_is_missing(site: Site) -> None:
    with (
        pytest.raises(ServerError, match=r"server_\*\.json within 1 s .*`megarl servers`"),
        site.fleet(discover=True, start_timeout_s=1),
    ):
        pass


@pytest.mark.slow
def test_a_server_that_a_killed_trainer_left_paused_is_not_started_again(site: Site) -> None:
    paused = site.program.parent / "paused"
    with supervisor(site, "rollout.probe_timeout_s=0.7"):
        until(lambda: told(site), 60)
        before = told(site)
        command = [sys.executable, "-c", HOLDS, str(site.run.root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
            assert trainer.stdout is not None and trainer.stdout.readline() == "holds\n"
            time.sleep(1.0)  # the supervisor looks every half second
            site.tell("paused")
            time.sleep(3.0)
            trainer.kill()
        assert paused.exists() and told(site) == before
        until(lambda: not paused.exists(), 30)
        time.sleep(2.0)
        assert told(site) == before
    assert "started again" not in (site.run.root / "supervisor.log").read_text()


@pytest.mark.slow
def test_a_supervisor_ends_with_its_parent_and_says_when_nothing_is_left(
    site: Site,
) -> None:
    parent = subprocess.Popen(["sleep", "300"])
    command = f"--parent-pid={parent.pid}"
    with supervisor(site, command) as process:
        until(lambda: told(site), 60)
        (entry,) = told(site).values()
        parent.kill()
        parent.wait()
        assert process.wait(20) == 0 and not lives(int(str(entry["pid"])))
    site.tell("fail")
    with supervisor(site, "on_failure.max_restarts=0") as process:
        assert process.wait(60) == 1
    assert "exit code 7" in (site.run.root / "supervisor.log").read_text()
