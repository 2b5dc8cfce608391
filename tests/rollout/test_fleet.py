"""Servers as processes: started, watched, ended, and gone when we are."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl import __version__
from megarl.errors import ConfigError, ServerError
from megarl.rollout import starter
from megarl.rollout.fleet import ServerDeath, start_fleet
from megarl.rollout.managed import ManagedServer
from megarl.rollout.process import lives, read_key, read_or_make_key
from megarl.rundir import RunDir
from tests.rollout.conftest import Server, server_section

# Stands in for SGLang: says what it was given, knows the health check, leaves a child behind.
OTHER_SERVER = """
import http.server, json, subprocess, sys, time
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
key = json.load(open(options["--config"]))["api-key"]
child = subprocess.Popen(["sleep", "300"])
print("server_args", sys.argv, "key", key, "child", child.pid, flush=True)
if sys.argv[1] == "fail":
    sys.exit("address already in use" if False else 7)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        good = self.headers["Authorization"] == f"Bearer {key}"
        self.send_response(200 if good else 401)
        self.end_headers()
        told = {"version": "0.5.23", "weight_version": "0"}
        told["internal_states"] = [{"megarl_plugin": "0.3.0"}]
        self.wfile.write(json.dumps(told).encode())
http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


class Deaths:
    def __init__(self) -> None:
        self.seen: list[ServerDeath] = []
        self._event = threading.Event()

    def __call__(self, death: ServerDeath) -> None:
        self.seen.append(death)
        self._event.set()

    def wait(self) -> ServerDeath:
        assert self._event.wait(10)
        return self.seen[0]


def other_section(tmp_path: Path, mode: str) -> Any:
    program = tmp_path / "other.py"
    program.write_text(OTHER_SERVER)
    command = (sys.executable, str(program), mode)
    return server_section(engine="sglang", server_command=command, start_timeout_s=20)


def gone(pid: int, timeout_s: float = 6.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not lives(pid)


def child_of(log: str) -> int:
    return int(log.split(" child ")[1].split()[0])


def assert_private(server: ManagedServer, key: str) -> None:
    """All of its processes listen on loopback alone, and none shows the key."""
    root = psutil.Process(server.process.pid)
    processes = [root, *root.children(recursive=True)]
    listening = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}
    shown = [word for p in processes for word in (*p.cmdline(), *p.environ().values())]
    assert key not in "".join(shown) and key not in server.log_file.read_text()


def test_a_server_that_dies_is_reported_with_its_cause(model_a: Path, tmp_path: Path) -> None:
    run, deaths = RunDir(tmp_path), Deaths()
    run.server(0).write_text(json.dumps({"pid": 2**22, "host": os.uname().nodename}))  # stale
    fleet = start_fleet(server_section(), run_dir=run, model=model_a, dtype="fp32", on_death=deaths)
    server = fleet.managed[0]
    with pytest.raises(ServerError, match=f"still runs \\(pid {server.process.pid}\\)"):
        start_fleet(server_section(), run_dir=run, model=model_a, dtype="fp32", on_death=deaths)
    (member,) = fleet.members()
    assert json.loads(run.server(0).read_text()) == {
        "url": member.url,
        "pid": server.process.pid,
        "host": os.uname().nodename,
        "boot": member.boot,
        "ranks": 1,
        "version": f"megarl-embedded {__version__}",
    }
    assert run.key.stat().st_mode & 0o777 == 0o600
    assert_private(server, fleet.key)
    os.kill(server.process.pid, signal.SIGKILL)
    death = deaths.wait()
    assert death.name == "server 0" and death.cause.startswith("signal SIGKILL")
    assert "megarl serve: http://127.0.0.1:" in death.cause  # the end of its log
    assert fleet.members() == [] and not run.server(0).exists()
    assert fleet.trouble() and death.cause in fleet.trouble()
    fleet.close()
    assert len(deaths.seen) == 1


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    run, deaths = RunDir(tmp_path), Deaths()
    with pytest.raises(ServerError) as caught:
        start_fleet(
            server_section(),
            run_dir=run,
            model=tmp_path,
            dtype="fp32",
            on_death=deaths,
            embedded_command=(sys.executable, "-c", "print('no such model'); raise SystemExit(2)"),
        )
    assert "exit code 2" in str(caught.value) and "no such model" in str(caught.value)
    assert deaths.seen == []


def test_a_port_that_is_taken_is_named(model_a: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ServerError) as caught:
            start_fleet(
                server_section(port=port),
                run_dir=RunDir(tmp_path),
                model=model_a,
                dtype="fp32",
                on_death=Deaths(),
            )
    assert f"host, port: found 127.0.0.1, {port}" in str(caught.value), caught.value
    assert "in use" in str(caught.value)


def test_a_server_that_is_never_ready_is_ended_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "_PROGRESS_S", 0.1)
    words: list[str] = []
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"not ready within 1 s \(rollout.start_timeout_s\)"):
        start_fleet(
            server_section(start_timeout_s=1),
            run_dir=RunDir(tmp_path),
            model=tmp_path,
            dtype="fp32",
            on_death=Deaths(),
            embedded_command=(
                *(sys.executable, "-c"),
                "import time; print('loading layer 3', flush=True); time.sleep(300)",
            ),
            progress=words.append,
        )
    assert any("server 0: starting, " in w and w.endswith("loading layer 3") for w in words), words
    assert time.monotonic() - start < 5


def test_a_foreign_server_gets_its_key_by_file_and_ends_with_its_children(tmp_path: Path) -> None:
    run, deaths = RunDir(tmp_path), Deaths()
    section = other_section(tmp_path, "serve")
    fleet = start_fleet(section, run_dir=run, model=tmp_path, dtype="bf16", on_death=deaths)
    server = fleet.managed[0]
    log = server.log_file.read_text()
    assert fleet.key not in log and "key ***" in log and "'bfloat16'" in log
    assert all((p.stat().st_mode & 0o077) == 0 for p in (server.log_file, run.key))
    child = child_of(log)
    assert lives(child)
    assert_private(server, fleet.key)
    fleet.close()
    assert gone(child) and gone(server.process.pid) and deaths.seen == []


def test_a_foreign_server_that_fails_leaves_its_exit_code_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    section = other_section(tmp_path, "fail")
    with pytest.raises(ServerError, match="exit code 7"):
        start_fleet(section, run_dir=run, model=tmp_path, dtype="bf16", on_death=Deaths())
    assert gone(child_of((run.logs / "server_0.log").read_text()))


def test_an_embedded_server_ends_when_its_starter_is_killed(model_a: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    program = f"""
import os, subprocess, sys, time
flags = "--dtype fp32 --max-running 8 --key-file {tmp_path}/key --ready-file {ready} --parent-pid"
command = [sys.executable, "-m", "megarl.cli", "serve", "{model_a}", *flags.split()]
subprocess.Popen([*command, str(os.getpid())], start_new_session=True)
time.sleep(300)
"""
    starter = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 60
    while not ready.exists():
        assert time.monotonic() < deadline and starter.poll() is None
        time.sleep(0.05)
    pid = json.loads(ready.read_text())["pid"]
    starter.kill()
    starter.wait()
    assert gone(pid, 3.0) and not ready.exists()


def test_a_foreign_server_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    section = other_section(tmp_path, "serve")
    program = f"""
import time
from pathlib import Path
from megarl.config.rollout import RolloutSection
from megarl.rollout.fleet import start_fleet
from megarl.rundir import RunDir
section = RolloutSection.model_validate_json({section.model_dump_json()!r})
run = Path({str(tmp_path)!r})
fleet = start_fleet(section, run_dir=RunDir(run), model=run, dtype="fp32", on_death=print)
print(fleet.managed[0].process.pid, flush=True)
time.sleep(300)
"""
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    child = child_of((tmp_path / "logs" / "server_0.log").read_text())
    starter.kill()
    starter.wait()
    assert gone(pid) and gone(child)


def test_external_servers_need_their_key_and_must_answer(server: Server, tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def start(**changes: Any) -> Any:
        section = server_section(urls=(server.url,), start_timeout_s=1, **changes)
        return start_fleet(section, run_dir=run, model=tmp_path, dtype="fp32", on_death=Deaths())

    with pytest.raises(ConfigError, match=r"rollout\.key_file"):
        start()
    with pytest.raises(ConfigError, match=r"rollout\.key_file"):
        start(key_file=tmp_path / "missing")
    wrong = tmp_path / "wrong"
    read_or_make_key(wrong)
    with pytest.raises(ServerError, match="HTTP 401"):
        start(key_file=wrong)
    right = tmp_path / "right"
    right.write_text(server.key)
    fleet = start(key_file=right)
    assert fleet.urls == (server.url,) and fleet.managed == ()
    assert len(fleet.controls()[0].control("digest", {}, 10)["digests"]) > 10
    fleet.close()
    assert server.call("GET", "/health")[0] == 200


def test_a_key_is_made_once_and_then_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "server.key"
    keys: list[str] = []
    threads = [
        threading.Thread(target=lambda: keys.append(read_or_make_key(path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1 and len(keys) == 8 and len(keys[0]) > 30
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["server.key"]
    assert set(keys[0]) <= set("0123456789abcdef")  # a dash in front would be a flag to SGLang


@pytest.mark.parametrize("text", ["", "two words", "-dashed", "schlüssel"])
def test_a_key_that_a_server_could_not_be_given_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rollout\.key_file.* leading dash"):
        read_key(path)
    path.write_text("in-the-middle\n")
    assert read_key(path) == "in-the-middle"


@pytest.mark.parametrize("routing", [False, True])
def test_a_server_is_told_to_keep_routed_experts_where_they_are_replayed(
    tmp_path: Path, routing: bool
) -> None:
    said = tmp_path / "arguments"
    program = f"import sys; open({str(said)!r}, 'w').write(' '.join(sys.argv)); sys.exit(3)"
    command = (sys.executable, "-c", program)
    section = server_section(engine="sglang", server_command=command, start_timeout_s=20)
    given = {"run_dir": RunDir(tmp_path), "model": tmp_path, "dtype": "fp32"}
    with pytest.raises(ServerError):
        start_fleet(section, **given, on_death=Deaths(), routing=routing)
    assert ("--enable-return-routed-experts" in said.read_text().split()) is routing


@pytest.mark.parametrize(
    "sizes, flags",
    [
        ({}, {"--tp-size": "1"}),
        ({"server_tp": 4}, {"--tp-size": "4"}),
        (
            {"server_tp": 4, "server_ep": 2, "server_dp": 2},
            {"--tp-size": "4", "--ep-size": "2", "--dp-size": "2", "--enable-dp-attention": ""},
        ),
    ],
)
def test_the_sizes_of_a_server_reach_sglang(
    tmp_path: Path, sizes: dict[str, int], flags: dict[str, str]
) -> None:
    said = tmp_path / "arguments"
    program = f"import sys; open({str(said)!r}, 'w').write(' '.join(sys.argv)); sys.exit(3)"
    command = (sys.executable, "-c", program)
    section = server_section(engine="sglang", server_command=command, **sizes)
    given = {"run_dir": RunDir(tmp_path), "model": tmp_path, "dtype": "fp32"}
    with pytest.raises(ServerError):
        start_fleet(section, **given, on_death=Deaths())
    words = f"{said.read_text()} "
    for flag in ("--tp-size", "--ep-size", "--dp-size", "--enable-dp-attention"):
        assert (f" {flag} " in words) == (flag in flags)
        assert f" {flag} {flags.get(flag, '')}".rstrip() + " " in words or flag not in flags


@pytest.mark.parametrize("argument", ["--api-key=x", "--config", "--port"])
def test_arguments_that_the_run_sets_are_refused(argument: str, tmp_path: Path) -> None:
    section = server_section(engine="sglang", server_command=("x",), server_args=(argument,))
    with pytest.raises(ConfigError, match=r"rollout\.server_args"):
        start_fleet(
            section, run_dir=RunDir(tmp_path), model=tmp_path, dtype="fp32", on_death=Deaths()
        )
