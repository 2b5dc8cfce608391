"""The same fleet, client and control operations with the real SGLang server behind them."""

from pathlib import Path

import pytest
import torch

from megarl.ops import digest
from megarl.rollout.collector import Collector, CollectorSettings
from megarl.rollout.fleet import ServerDeath, start_fleet
from megarl.rundir import RunDir
from megarl.types import GroupRequest, Member, Prompt, RoutingShape, Sampling, VersionSpan
from tests.rollout.conftest import (
    CONTEXT,
    EOS,
    EXPERTS,
    LAYERS,
    TOP_K,
    VOCAB,
    Reference,
    Server,
    server_section,
)
from tests.rollout.spelling import write_tokenizer
from tests.rollout.test_server_weights import Sender
from tests.sglang.server import SUPPORT, VENV, require_sglang
from tests.sync.bucketing import bucketize

ARGUMENTS = (
    "--device cpu --skip-tokenizer-init --attention-backend torch_native "
    "--sampling-backend pytorch --cuda-graph-backend-decode disabled "
    "--cuda-graph-backend-prefill disabled --max-total-tokens 4096 --max-running-requests 8 "
    "--enable-return-routed-experts --skip-server-warmup --sleep-on-idle"
)
PROMPTS = [Prompt(f"p{i}", (3 + i, 5, 7), {"reward": 1.0}) for i in range(4)]


def check(collector: Collector, reference: Reference, version: int) -> None:
    """Samples of every prompt are what the reference would have sampled under ``version``."""
    collector.issue(
        [
            GroupRequest(10 * version + i, version, p, (2 * i, 2 * i + 1), Sampling(1.0, 8))
            for i, p in enumerate(PROMPTS)
        ]
    )
    collector.wait(len(PROMPTS), 120.0)
    outcomes = collector.take()
    assert len(outcomes) == len(PROMPTS) and not any(o.failed for o in outcomes), outcomes
    for sample in (s for o in outcomes for s in o.samples):
        tokens = sample.tokens.tolist()
        expected = reference.logprobs(tokens)[2:]
        got = torch.from_numpy(sample.rollout_logprobs[3:])
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        assert sample.version_spans == (VersionSpan(version, 0, len(tokens) - 3, "server 0"),)
        assert sample.routing is not None
        chosen = torch.from_numpy(sample.routing).sort(-1).values
        assert torch.equal(chosen, reference.routing(tokens)[:-1].sort(-1).values.int())


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
    settings = CollectorSettings(
        hf=write_tokenizer(tmp_path / "tokenizer", VOCAB, EOS),
        eos_ids=(EOS,),
        reward="import:tests.rollout.rewards:as_told",
        key_file=RunDir(tmp_path).key,
        log_file=tmp_path / "collector_0.log",
        routing=RoutingShape((True,) * LAYERS, TOP_K, EXPERTS),
    )
    collector = Collector(settings)
    collector.serve_from([Member("server 0", fleet.urls[0], "1")])

    check(collector, reference_a, 0)
    with Sender(Server(fleet.urls[0], fleet.key, model_a), model_b, None) as sender:
        sender.control.control("begin", {}, 60)
        for bucket in bucketize(sender.weights.items(), 100_000):
            sender.send(bucket)
        digests = sender.control.control("digest", {}, 60)["digests"]
        assert digests == {name: digest(t) for name, t in sender.weights.items()}
        sender.control.control("commit", {"version": 5}, 60)
    check(collector, reference_b, 5)
    collector.close()
    fleet.close()
    assert deaths == []
