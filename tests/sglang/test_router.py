"""The real sglang-router in front of servers of ours: who is asked, and what passes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.errors import ServerError
from megarl.rollout.client import Failure
from megarl.rollout.process import read_or_make_key
from megarl.rollout.replies import Ask
from megarl.rollout.routed import connect
from megarl.rollout.router import Router
from megarl.rollout.starter import free_port
from megarl.rollout.watching import ServerDeath
from megarl.rundir import RunDir
from megarl.types import Member, Sampling

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).parents[1] / "rollout" / "standin.py"
COMMAND = (sys.executable, "-m", "sglang_router.launch_router")  # of the group dev


class Site:
    """A router and two workers."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run")
        self.key = read_or_make_key(self.run.key)
        self.program = folder / "standin.py"
        self.program.write_text(PROGRAM.read_text())
        (folder / "keys.yaml").write_text(json.dumps({"api-key": self.key}))
        self.words: list[str] = []
        self.deaths: list[ServerDeath] = []
        (folder / "gone").write_text("")
        self.workers = [self._worker(i) for i in range(2)]
        try:
            self.router = self.start("--policy", "round_robin")
        except BaseException:
            self.end_workers()
            raise

    def start(self, *more: str, restarts: int = 1) -> Router:
        return Router(
            (*COMMAND, *more),
            run_dir=self.run,
            key=self.key,
            key_file=self.run.key,
            host="127.0.0.1",
            timeout_s=60.0,
            request_timeout_s=30.0,
            max_restarts=restarts,
            say=self.words.append,
            report=self.deaths.append,
        )

    def _worker(self, index: int) -> Member:
        port = free_port("127.0.0.1")
        options = ["--config", str(self.program.parent / "keys.yaml"), "--host", "127.0.0.1"]
        command = [sys.executable, str(self.program), *options, "--port", str(port)]
        self.processes = [*getattr(self, "processes", []), subprocess.Popen(command)]
        return Member(f"server {index}", f"http://127.0.0.1:{port}", "boot")

    def post(self, path: str, body: object, *, key: str | None = None) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key if key is None else key}"}
        request = urllib.request.Request(
            self.router.member().url + path, json.dumps(body).encode(), headers
        )
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=20) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, first: int, **fields: Any) -> tuple[int, Any]:
        sampling = {"max_new_tokens": 3, "sampling_seed": 7, "temperature": 0.5}
        prompt = list(range(first, first + 40))  # nothing in common with another
        body = {"rid": "r1", "input_ids": prompt, "sampling_params": sampling}
        return self.post("/generate", {**body, "return_logprob": True, **fields})

    def asks(self, first: int) -> int:
        try:
            return self.generate(first)[0]
        except OSError:
            return 0

    def say_completion(self) -> None:
        told = {
            "output_ids": [5, 6],
            "id": "r1",
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
            "weight_version": "0",
        }
        (self.program.parent / "response.json").write_text(json.dumps(told))

    def asked(self) -> list[tuple[int, dict[str, Any]]]:
        """(port, body) of every /generate that reached a worker."""
        lines = (self.program.parent / "calls").read_text().splitlines()
        words = [line.split(" ", 3) for line in lines]
        return [(int(w[0]), json.loads(w[3])) for w in words if w[2] == "/generate"]

    def close(self) -> None:
        self.router.close()
        self.end_workers()

    def end_workers(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def router_process(router: Router) -> psutil.Process:
    (found,) = psutil.Process(router._server.process.pid).children()
    return found


def test_the_router_asks_those_that_may_serve_and_no_others(site: Site) -> None:
    router, (a, b) = site.router, site.workers
    port = {m.url: int(m.url.rpartition(":")[2]) for m in site.workers}
    assert site.generate(0)[0] == 503  # nobody is known yet
    router.serve([a, b])
    for first in range(0, 400, 40):
        status, reply = site.generate(first)
        assert status == 200 and reply["output_ids"] == [3]
    assert {p for p, _ in site.asked()} == set(port.values())
    router.serve([b])
    seen = len(site.asked())
    assert all(site.generate(first)[0] == 200 for first in range(0, 160, 40))
    assert {p for p, _ in site.asked()[seen:]} == {port[b.url]}
    router.serve([b])  # again: nothing to do
    router.serve([])
    assert site.generate(0)[0] == 503

    # What passes: one sequence with its parameters. What does not is why groups are not asked for
    # as one request, and why routing is not replayed through a router.
    router.serve([a])
    assert site.generate(3, return_routed_experts=True)[0] == 200
    sent = site.asked()[-1][1]
    assert sent["rid"] == "r1" and sent["return_logprob"] is True
    assert sent["sampling_params"]["sampling_seed"] == 7
    assert sent["sampling_params"]["temperature"] == 0.5
    assert "return_routed_experts" not in sent
    assert site.generate(3, rid=["a", "b"], input_ids=[[3], [4]])[0] == 422


def test_the_key_guards_the_router_and_shows_nowhere(site: Site) -> None:
    router, (a, _) = site.router, site.workers
    router.serve([a])
    assert site.post("/generate", {"input_ids": [1]}, key="wrong")[0] == 401
    assert site.post("/workers", {"url": "http://127.0.0.1:9"}, key="wrong")[0] == 401
    process = router_process(router)
    told = [*process.cmdline(), *psutil.Process(process.ppid()).cmdline(), *site.words]
    told += [path.read_text() for path in site.run.logs.iterdir()]
    assert not [text for text in told if site.key in text]
    listening = [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]
    assert listening and set(listening) == {"127.0.0.1"}


def test_a_router_that_dies_is_started_again_with_its_workers(site: Site) -> None:
    router, before = site.router, site.router.member()
    router.serve(site.workers)
    first = router_process(router).pid
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while len(site.words) < 2:  # started again, by itself
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert site.asks(0) == 200  # at the same address
    assert router.member() == before and router_process(router).pid != first
    assert site.deaths == []
    os.kill(router_process(router).pid, signal.SIGKILL)
    while not site.deaths:  # its one restart is used up
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "router died: signal SIGKILL" in str(site.deaths[0])


def test_a_group_goes_through_the_router_as_requests_of_its_own(site: Site) -> None:
    site.router.serve(site.workers)
    site.say_completion()
    asks = [Ask(f"r{i}", [3, 4, i], 2, seed=7 + i) for i in range(3)]

    async def ask(timeout_s: float) -> Any:
        client = connect(site.router.member(), site.key, timeout_s)
        try:
            return await client.generate(asks, Sampling(0.5, 2))
        finally:
            await client.close()

    answer = asyncio.run(ask(20.0))
    # The program answers every request as one of r1.
    assert [part is not None for part in answer.parts] == [False, True, False], answer
    assert answer.parts[1].token_ids.tolist() == [5, 6] and "r0" in answer.wrong
    sent = [body for _, body in site.asked()]
    assert sorted(body["rid"] for body in sent) == ["r0", "r1", "r2"]
    assert {body["sampling_params"]["sampling_seed"] for body in sent} == {7, 8, 9}
    # Of what is said to be off, nulls do not pass: managed servers, which alone have routers, must
    # not have defaults of such (config/rollout_rules.py).
    off = {"n": 1, "min_new_tokens": 0, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0}
    for params in (body["sampling_params"] for body in sent):
        assert {name: params[name] for name in off} == off and "logit_bias" not in params

    # A request that is given up ends at the server, whose connection the router closes.
    (site.program.parent / "hang_generate").write_text("")
    failed = asyncio.run(ask(1.0))
    assert isinstance(failed, Failure) and failed.taken
    deadline = time.monotonic() + 20
    while (site.program.parent / "gone").read_text().count("/generate") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_router_that_does_not_start_says_why(site: Site) -> None:
    start = time.monotonic()
    with pytest.raises(
        ServerError, match=r"did not start \(rollout.router_command\)[\s\S]*nonsense"
    ):
        site.start("--policy", "nonsense")
    assert time.monotonic() - start < 60
