"""The fleet with the real SGLang: started, private, busy, hung, started again."""

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.config.rollout import RolloutSection
from megarl.errors import ServerError
from megarl.rollout.fleet import Fleet, ServerDeath, start_fleet
from megarl.rollout.probe import Probe
from megarl.rollout.process import lives
from megarl.rundir import RunDir
from megarl.types import Member
from tests.sglang.conftest import Models
from tests.sglang.server import SUPPORT, VENV, require_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]
ARGUMENTS = (
    "--device cpu --skip-tokenizer-init --attention-backend torch_native "
    "--sampling-backend pytorch --cuda-graph-backend-decode disabled "
    "--cuda-graph-backend-prefill disabled --max-total-tokens 4096 --max-running-requests 1 "
    "--skip-server-warmup --sleep-on-idle"
)


def processes(fleet: Fleet) -> dict[str, psutil.Process]:
    root = psutil.Process(fleet.managed[0].process.pid)
    return {p.name(): p for p in [root, *root.children(recursive=True)]}


def generate(url: str, key: str, new: int, timeout_s: float) -> int:
    sampling = {"max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": [3, 4, 5], "sampling_params": sampling}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout_s) as response:
        return len(json.loads(response.read())["output_ids"])


def assert_private(fleet: Fleet) -> None:
    found = processes(fleet)
    listening = {
        (name, c.laddr.ip)
        for name, p in found.items()
        for c in p.net_connections("inet")
        if c.status == "LISTEN"
    }
    # Of torch.distributed, whose store knows no interface; docs/rollout-servers.md says so.
    listening.discard(("sglang::scheduler", "::"))
    assert listening and {ip for _, ip in listening} <= {"127.0.0.1", "::1"}
    shown = [w for p in found.values() for w in (*p.cmdline(), *p.environ().values())]
    assert fleet.key not in "".join(shown)
    assert fleet.key not in fleet.managed[0].log_file.read_text()


def assert_busy_is_no_trouble(fleet: Fleet, probe: Probe) -> None:
    """Its one slot is taken for long, and a token of ours has to wait."""
    lengths: list[int] = []
    others = [
        threading.Thread(target=lambda: lengths.append(generate(probe.url, fleet.key, 400, 600.0)))
        for _ in range(4)
    ]
    for thread in others:
        thread.start()
    checks = 0
    while len(lengths) < 3:
        probe.check(5.0, token_timeout_s=3.0)  # its throughput is measured every 40 steps
        checks += 1
    for thread in others:
        thread.join()
    assert checks > 1 and lengths == [400] * 4
    assert len(fleet.members()) == 1 and fleet.events == {}


def assert_replaced_when_hung(fleet: Fleet, member: Member) -> Member:
    """Its scheduler stands still, and the front answers."""
    scheduler = next(p for name, p in processes(fleet).items() if "scheduler" in name)
    os.kill(scheduler.pid, signal.SIGSTOP)
    with pytest.raises(ServerError):
        Probe(member.url, fleet.key).check(5.0)
    deadline = time.monotonic() + 600
    while not (now := fleet.members()) or now == [member]:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert fleet.events == {"hung": 1, "restarts": 1}
    assert now[0].boot != member.boot and not lives(scheduler.pid)
    return now[0]


@pytest.fixture
def fleet(tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    require_sglang()
    for name, value in (
        ("SGLANG_USE_CPU_ENGINE", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("PYTHONPATH", f"{SUPPORT}:{Path(__file__).parents[2]}"),
    ):
        monkeypatch.setenv(name, value)
    section = RolloutSection(
        engine="sglang",
        context_length=512,
        start_timeout_s=600,
        probe_every_s=2.0,
        probe_timeout_s=15.0,
        server_command=(str(VENV / "bin" / "python"), "-m", "sglang.launch_server"),
        server_args=tuple(ARGUMENTS.split()),
    )
    deaths: list[ServerDeath] = []
    fleet = start_fleet(
        section,
        run_dir=RunDir(tmp_path),
        model=tiny_models.a,
        dtype="fp32",
        on_death=deaths.append,
        on_failure="restart",
        max_restarts=2,
    )
    try:
        yield fleet
    finally:
        pids = [p.pid for p in processes(fleet).values()]
        fleet.close()
    deadline = time.monotonic() + 10.0
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert deaths == []


def test_sglang_is_watched_by_work_and_started_again(fleet: Fleet) -> None:
    (member,) = fleet.members()
    assert member.version == "sglang 0.5.23" and member.ranks == 1
    assert_private(fleet)
    probe = Probe(member.url, fleet.key)
    identity = probe.check(60.0, token_timeout_s=60.0)
    assert_busy_is_no_trouble(fleet, probe)
    assert identity.same_process(probe.identity()) and identity.ranks == 1
    new = assert_replaced_when_hung(fleet, member)
    assert generate(new.url, fleet.key, 3, 60.0) == 3
    again = Probe(new.url, fleet.key).identity()
    assert again.mark and not identity.same_process(again)
