"""A server split over two ranks, by tensor and by expert."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from safetensors.torch import load_file

from tests.sglang.protocol import PROMPT, digests, joined_group, ok, prompt_logprobs, received, send
from tests.sglang.server import SGLangServer, require_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_every_rank_gets_and_reports_all_tensors_whole(tiny_models, reference, tmp_path):
    require_sglang()
    server = SGLangServer(
        tiny_models.a,
        log_path=tmp_path / "server.log",
        extra_args=("--tp-size", "2", "--ep-size", "2"),
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # compulsory: more ranks than NUMA nodes
    )
    weights = load_file(tiny_models.b / "model.safetensors")
    with server, ThreadPoolExecutor(2) as pool:
        with joined_group(server, pool, num_server_ranks=2) as group:
            ok(server, "/pause_generation", mode="retract")
            ok(server, "/begin_weight_update")
            send(server, group, pool, weights)
            assert received(server) == [digests(weights)] * 2
            ok(server, "/end_weight_update")
            ok(server, "/flush_cache")
            ok(server, "/continue_generation")
        expected = reference(tiny_models.b, PROMPT)["logprobs"]
        assert prompt_logprobs(server) == pytest.approx(expected, abs=1e-5)
