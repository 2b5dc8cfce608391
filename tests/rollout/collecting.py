"""Collectors of the tests: their folder, their settings, and their outcomes as they come."""

import time
from pathlib import Path
from typing import Any

from megarl.rollout.collector import Collector, CollectorSettings
from megarl.types import GroupOutcome, GroupRequest, Prompt, Sampling
from tests.rollout.spelling import write_tokenizer

KEY = "secret-key"
REWARDS = "import:tests.rollout.rewards:"
BUDGET = 10


def write_folder(folder: Path, vocab: int, eos: int, key: str = KEY) -> Path:
    """A tokenizer and a key."""
    write_tokenizer(folder, vocab, eos)
    (folder / "key").write_text(f"{key}\n")
    (folder / "key").chmod(0o600)
    return folder


def settings_in(folder: Path, eos: int = 1, **changes: Any) -> CollectorSettings:
    given: dict[str, Any] = {
        "hf": folder,
        "eos_ids": (eos,),
        "reward": f"{REWARDS}even_length",
        "key_file": folder / "key",
        "log_file": folder / "logs" / "collector_0.log",
        "request_timeout_s": 30.0,
    }
    return CollectorSettings(**(given | changes))


def request(serial: int, *, group: int = 4, prompt: int = 3, **payload: Any) -> GroupRequest:
    given = payload or {"answer": serial % 2}
    asked = Prompt(f"p{serial}", tuple(range(2, 2 + prompt)), given)
    seeds = tuple(1000 * serial + i for i in range(group))
    return GroupRequest(serial, 1, asked, seeds, Sampling(1.0, BUDGET))


def taken(collector: Collector, count: int, timeout_s: float = 60.0) -> dict[int, GroupOutcome]:
    """``count`` outcomes by serial, as they come."""
    found: dict[int, GroupOutcome] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        collector.wait(1, 1.0)
        new = {outcome.serial: outcome for outcome in collector.take()}
        assert not new.keys() & found.keys()
        found |= new
        collector.suspects()
    return found
