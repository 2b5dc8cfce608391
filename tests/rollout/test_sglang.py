"""The same fleet, client and control operations with the real SGLang server behind them."""

from pathlib import Path

import pytest
import torch

from megarl.ops import digest
from megarl.rollout.collect import CollectSettings, RolloutCollector
from megarl.rollout.fleet import ServerDeath, start_fleet
from megarl.rundir import RunDir
from megarl.sync.stream import bucketize
from megarl.types import Prompt, RoutingShape, VersionSpan
from tests.rollout.conftest import (
    CONTEXT,
    EXPERTS,
    LAYERS,
    TOP_K,
    Reference,
    Server,
    server_section,
)
from tests.rollout.test_server_weights import Sender
from tests.sglang.server import SUPPORT, VENV, require_sglang

ARGUMENTS = (
    "--device cpu --skip-tokenizer-init --attention-backend torch_native "
    "--sampling-backend pytorch --cuda-graph-backend-decode disabled "
    "--cuda-graph-backend-prefill disabled --max-total-tokens 4096 --max-running-requests 8 "
    "--enable-return-routed-experts --skip-server-warmup --sleep-on-idle"
)
PROMPTS = [Prompt(f"p{i}", (3 + i, 5, 7), {}) for i in range(4)]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sglang_is_started_asked_updated_and_ended(
    model_a: Path,
    model_b: Path,
    reference_a: Reference,
    reference_b: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_sglang()
    for name, value in (
        ("SGLANG_USE_CPU_ENGINE", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("PYTHONPATH", f"{SUPPORT}:{Path(__file__).parents[2]}"),
    ):
        monkeypatch.setenv(name, value)
    section = server_section(
        engine="sglang",
        context_length=CONTEXT,
        start_timeout_s=600,
        server_command=(str(VENV / "bin" / "python"), "-m", "sglang.launch_server"),
        server_args=tuple(ARGUMENTS.split()),
    )
    deaths: list[ServerDeath] = []
    fleet = start_fleet(
        section, run_dir=RunDir(tmp_path), model=model_a, dtype="fp32", on_death=deaths.append
    )
    log = fleet.managed[0].log_file.read_text()
    assert fleet.key not in log and "***" in log  # it logs its arguments
    settings = CollectSettings(
        2, 1.0, 0, 60.0, routing=RoutingShape((True,) * LAYERS, TOP_K, EXPERTS)
    )
    collector = RolloutCollector(fleet.urls, fleet.key, settings, decode=str, reward=lambda *_: 1.0)

    def check(reference: Reference, version: int) -> None:
        for sample in collector.collect(PROMPTS, version, 8).samples:
            tokens = sample.tokens.tolist()
            expected = reference.logprobs(tokens)[2:]
            got = torch.from_numpy(sample.rollout_logprobs[3:])
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
            assert sample.version_spans == (VersionSpan(version, 0, len(tokens) - 3),)
            assert sample.routing is not None
            chosen = torch.from_numpy(sample.routing).sort(-1).values
            assert torch.equal(chosen, reference.routing(tokens)[:-1].sort(-1).values.int())

    check(reference_a, 0)
    with Sender(Server(fleet.urls[0], fleet.key, model_a), model_b, None) as sender:
        sender.control.control("begin", {}, 60)
        for bucket in bucketize(sender.weights.items(), 100_000):
            sender.send(bucket)
        digests = sender.control.control("digest", {}, 60)["digests"]
        assert digests == {name: digest(t) for name, t in sender.weights.items()}
        sender.control.control("commit", {"version": 5}, 60)
    check(reference_b, 5)
    collector.close()
    fleet.close()
    assert deaths == []
