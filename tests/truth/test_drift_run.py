"""A run one of whose servers serves other weights than it was given: the log says which."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs, Launch, inputs, launch  # noqa: F401 (fixtures)
from tests.sync.servers import http
from tests.truth.models import perturbed
from tests.truth.proxy import Proxy

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@contextmanager
def served(model: Path, key_file: Path, ready: Path) -> Iterator[str]:
    """`megarl serve`, as somebody starts it who is not the run; its URL."""
    arguments = [sys.executable, "-m", "megarl.cli", "serve", str(model)]
    arguments += ["--key-file", str(key_file), "--ready-file", str(ready)]
    arguments += ["--parent-pid", str(os.getpid())]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        process.wait(10)


def test_a_server_with_other_weights_is_named_and_no_other(
    launch: Callable[..., Launch],  # noqa: F811
    inputs: Inputs,  # noqa: F811
    tmp_path: Path,
) -> None:
    """It loads them after the push of version 1, whose digests were right; version 2 replaces
    them. 1.2: of the final norm's weights, and so of all logits.
    """
    other = perturbed(inputs.hf, tmp_path / "other", "model.norm.weight", 1.2)
    key_file = tmp_path / "key"
    loads = []
    with ExitStack() as stack:
        urls = [
            stack.enter_context(served(inputs.hf, key_file, tmp_path / f"ready_{k}.json"))
            for k in range(2)
        ]
        key = key_file.read_text().strip()

        def after(path: str) -> None:
            if path != "/continue_generation":
                return
            _, info = http(urls[1], key, "/server_info")
            if info["weight_version"] == "1":
                body = {"model_path": str(other), "weight_version": "1"}
                loads.append(http(urls[1], key, "/update_weights_from_disk", body))

        proxy = stack.enter_context(Proxy(urls[1], after).running())
        run = launch(
            inputs.rl(
                tmp_path / "run",
                "run.steps=3",
                "data.prompts_per_step=16",
                f"rollout.urls=[{urls[0]},{proxy.url}]",
                f"rollout.key_file={key_file}",
            )
        )
        assert run.wait() == 0, run.text()
    assert [status for status, _ in loads] == [200], loads
    metrics = run.metrics()[1:]
    assert [m["servers/drifting"] for m in metrics] == [0, 1, 0], metrics
    named = [
        re.search(r"WARNING megarl\.drift: (.*) drifts from the trainer: k3", line)
        for line in (run.run / "logs" / "rank_0.log").read_text().splitlines()
        if "drifts" in line
    ]
    assert [found and found[1] for found in named] == [proxy.url]
    assert metrics[1][f"servers/{proxy.url}/mismatch_k3"] > 1e-3
    assert metrics[1][f"servers/{urls[0]}/mismatch_k3"] < 1e-6
    assert metrics[1]["sync/version"] == 2  # the push that put things right
