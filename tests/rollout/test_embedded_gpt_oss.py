"""The embedded engine with sliding windows, sinks, and experts that are stacked transposed."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.errors import ConfigError
from megarl.rollout.embedded import Engine
from tests.helpers.families import save_model
from tests.rollout.test_engine import PROMPTS, NoWeights, ask, slot_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("gpt_oss", tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(params=["fixed", "flexible"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    made = Engine(slot_model(folder, fixed_shape=request.param == "fixed"), NoWeights())
    made.start()
    yield made
    made.stop()


def test_both_shapes_compute_what_transformers_does(engine: Engine, folder: Path) -> None:
    """Prompts several windows long, with more sequences than slots."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    chosen: list[torch.Tensor] = []
    for layer in plain.model.layers:
        layer.mlp.router.register_forward_hook(lambda m, i, out: chosen.append(out[2]))
    prompts = [*PROMPTS, *PROMPTS[::-1], *PROMPTS]
    for prompt, result in zip(prompts, ask(engine, prompts), strict=True):
        tokens = prompt + result.token_ids
        chosen.clear()
        with torch.no_grad():
            logits = plain(torch.tensor([tokens])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert expected.std() > 0.3
        got = torch.tensor([*(result.input_logprobs or []), *result.logprobs])
        # fp32 on both sides, sums in another order; which tokens these are, is chance
        torch.testing.assert_close(got, expected, atol=3e-5, rtol=0)
        routing = torch.stack(chosen, dim=1)[:-1].sort(-1).values.numpy()
        np.testing.assert_array_equal(np.sort(result.routing, -1), routing)


def test_a_window_without_layers_of_its_own_is_refused(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["layer_types"] = ["full_attention"] * 4
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"full_attention.* sliding_window=6; accepted: "):
        slot_model(tmp_path)
