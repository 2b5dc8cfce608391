"""A run whose prompts take longer to read than its collector takes to start."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs, Launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_a_collector_finds_the_key_however_early_it_looks(
    launch: Callable[..., Launch], inputs: Inputs, tmp_path: Path
) -> None:
    few = [json.loads(line) for line in (inputs.data / "prompts.jsonl").read_text().splitlines()]
    many = tmp_path / "many.jsonl"
    with many.open("w") as file:
        for i in range(150_000):
            file.write(json.dumps(few[i % len(few)] | {"id": f"p{i}"}) + "\n")
    settings = ["run.steps=2", "optim.warmup_steps=0", f"data.prompts={many}"]
    run = launch(inputs.rl(tmp_path / "run", *settings))
    assert run.wait() == 0, run.text()
    assert [line["step"] for line in run.metrics()] == [0, 1, 2]
