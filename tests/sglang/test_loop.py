"""The same loop as with the embedded server, against the real SGLang: one protocol."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Inputs, Launch, launch  # noqa: F401 (a fixture)
from tests.sglang.conftest import Models
from tests.sglang.server import SGLangServer

pytestmark = [pytest.mark.sglang, pytest.mark.dist, pytest.mark.timeout(1500)]

OTHER_WAYS = ["sync.delta=true", "sync.transport=colocated", "sync.transport=disk"]


@pytest.mark.parametrize(
    "way",
    ["sync.transport=broadcast", *(pytest.param(w, marks=pytest.mark.slow) for w in OTHER_WAYS)],
)
def test_three_steps_of_rl_with_a_real_sglang_server(
    launch: Callable[..., Launch],  # noqa: F811
    sglang_server: SGLangServer,
    tiny_models: Models,
    demo_data: Path,
    tmp_path: Path,
    way: str,
) -> None:
    # The server starts with other weights than the trainer: only a push that arrives makes them
    # agree.
    status, reply = sglang_server.post(
        "/update_weights_from_disk", {"model_path": str(tiny_models.b), "flush_cache": True}
    )
    assert status == 200, reply
    key = tmp_path / "key"
    key.write_text(sglang_server.key)
    key.chmod(0o600)
    inputs = Inputs(tiny_models.a, Path("null"), demo_data)
    run = launch(
        inputs.rl(
            tmp_path / "run",
            "run.steps=3",
            "eval.every=3",
            "data.samples_per_prompt=2",
            "moe.routing_replay=rollout",
            "rollout.engine=sglang",
            f"rollout.urls=[{sglang_server.url}]",
            f"rollout.key_file={key}",
            way,
        )
    )
    assert run.wait() == 0, run.text()
    metrics = run.metrics()
    assert [m["sync/version"] for m in metrics] == [0, 1, 2, 3]
    for m in metrics[1:]:
        # fp32 on both sides, other kernels: rounding over 4 layers. The weights of one step
        # earlier, let alone model b's, give differences of 1e-3 and more.
        assert m["mismatch/max_abs_logprob_diff"] < 2e-5, m
        # By the updates of the step, of samples that are others every time; 0.3 and more if rows or
        # layers were moved.
        assert m["moe/replay_changed"] < 0.1, m
    samples = [json.loads(s) for s in (run.run / "samples/step_3.jsonl").read_text().splitlines()]
    assert {s["version"] for s in samples} == {2}
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
    status, reply = sglang_server.post("/generate", body)
    assert reply["meta_info"]["weight_version"] == "3", reply
