"""The real server's log-probs against the actor's: dense and routed, fp32 and bf16, TP 1 and 2.

A server of its own for every row; float32 with experts and one rank is in test_truth.py.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.dist import WorkerPool
from tests.helpers.families import COMMON
from tests.sglang.protocol import ok
from tests.sglang.server import SGLangServer, require_sglang
from tests.truth import untruncated
from tests.truth.models import save
from tests.truth.served import Address, Question, samples
from tests.truth.tolerances import check, differences, kind_of

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1500)]

NAMES = {"fp32": "float32", "bf16": "bfloat16"}
TWO_RANKS: dict[str, Any] = {
    "extra_args": ("--tp-size", "2"),
    "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # compulsory: more ranks than NUMA nodes
}


PREFERRED = {name: untruncated.RECOMMENDED[name] for name in ("temperature", "top_p", "top_k")}


@contextmanager
def started(folder: Path, log: Path, dtype: str, **options: Any) -> Iterator[SGLangServer]:
    require_sglang()
    with SGLangServer(folder, log_path=log, dtype=NAMES[dtype], **options) as server:
        ok(server, "/update_weight_version", new_version="0")
        yield server


@pytest.mark.parametrize(
    "kind, dtype, ranks",
    [
        ("dense", "fp32", 1),
        ("dense", "bf16", 1),
        ("routed throughout", "bf16", 1),
        ("routed throughout", "bf16", 2),
    ],
)
def test_log_probs_are_the_actors(
    pool: WorkerPool, tmp_path: Path, kind: str, dtype: str, ranks: int
) -> None:
    folder = save(kind, dtype, tmp_path / "model")
    options = TWO_RANKS if ranks == 2 else {}
    routed = kind != "dense"
    with started(folder, tmp_path / "log", dtype, routed=routed, **options) as server:
        address = Address(server.url, server.key)
        said = {t: samples(address, folder, temperature=t, per_prompt=6) for t in (1.0, 0.7)}
    questions = [
        Question(folder, given, dtype, t, replay)
        for t, given in said.items()
        for replay in ((False, True) if routed else (False,))
    ]
    for tp in (1, 2):
        found = differences(pool, questions, tp)
        for question, values in zip(questions, found, strict=True):
            check(values, kind_of(question))
        if routed:
            for own, replayed in zip(found[::2], found[1::2], strict=True):
                assert np.abs(own).max() > 2 * np.abs(replayed).max()
                assert np.square(own).mean() > 1.5 * np.square(replayed).mean()


def test_what_a_server_prefers_does_not_reach_rollouts(pool: WorkerPool, tmp_path: Path) -> None:
    """It is in force: who does not say otherwise gets tokens of the truncated distribution."""
    folder = save("dense", "fp32", tmp_path / "model")
    vocab, temperature, draws = COMMON["vocab_size"], 2.0, 200
    preferred = ("--preferred-sampling-params", json.dumps(PREFERRED))
    probabilities = untruncated.next_probabilities(pool, folder, vocab, temperature)
    with started(folder, tmp_path / "log", "fp32", routed=False, extra_args=preferred) as server:
        untruncated.check(Address(server.url, server.key), probabilities, temperature, draws)
        given = {"max_new_tokens": 1, "ignore_eos": True}
        ids = [untruncated.PROMPT] * 50
        replies = ok(server, "/generate", input_ids=ids, sampling_params=given)
    left = untruncated.truncated(probabilities, temperature)
    assert {reply["output_ids"][0] for reply in replies} <= left
