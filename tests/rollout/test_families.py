"""The embedded server's model of every family: what it computes, before and after a push.

Weights are pushed under the names of files, which is what an actor exports
(``tests/actor/test_convert.py``), and the server must then compute what transformers computes of
those files, which is what the actor computes (``tests/actor/test_families.py``).
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.ops import digest
from megarl.rollout.embedded_model import SlotModel
from megarl.sync.receiver import ModelReceiver
from megarl.sync.stream import specs_of
from tests.helpers.families import MODELS, reference_logprobs, save_model
from tests.helpers.samples import random_samples
from tests.sync.bucketing import bucketize
from tests.sync.sender import Sender

GROUPS = itertools.count()
SAMPLES = random_samples(2, 2, seed=4)
SERVED = ["qwen3 yarn tied", "qwen3_moe yarn", "deepseek_v3", "glm4_moe", "gpt_oss"]
SERVED += ["qwen2", "qwen2 windows tied", "llama", "llama biases tied", "mistral", "kimi_k2"]
TOLERANCE = 1e-5  # fp32, as in tests/actor/test_families.py


@pytest.fixture(params=SERVED)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    assert request.param in MODELS
    return save_model(request.param, tmp_path / "model")


def other_weights(model: Path, folder: Path) -> Path:
    """The same model, every tensor moved; what files hold twice stays twice the same."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    moved = {n: t + 0.03 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
    for name in moved:
        if ".embed_tokens" in name:
            moved[name] = moved["model.embed_tokens.weight"].clone()
        if ".shared_head.head" in name:
            moved[name] = moved["lm_head.weight"].clone()
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logprobs(served: SlotModel, fixed: bool) -> list[torch.Tensor]:
    """Of every sample, by a chunk each, or by rows of one token as in fixed-shape mode."""
    found = []
    for sample in SAMPLES:
        tokens = sample.tokens.astype(np.int64)
        if fixed:
            parts = [
                served.forward_rows(tokens[t : t + 1], np.array([t]), np.array([0]))[0]
                for t in range(len(tokens))
            ]
            logits = torch.cat(parts)
        else:
            logits, _ = served.forward_chunk(tokens, 0, 0, all_logits=True)
        chosen = torch.from_numpy(tokens[1:, None])
        found.append(logits[:-1].double().log_softmax(-1).gather(1, chosen)[:, 0])
        served.cache.clear()
    return found


def push(tensors: dict[str, torch.Tensor], file: Path, receiver: ModelReceiver) -> None:
    sender, name = Sender(file), f"families{next(GROUPS)}"
    try:
        port = sender.open(name)
        receiver.join_group(
            address="127.0.0.1", port=port, rank=1, world_size=2, name=name, backend="gloo"
        )
        receiver.begin()
        for bucket in bucketize(tensors.items(), 20_000):
            sender.send([n for n, _ in bucket], flattened=True)
            receiver.receive(specs_of(bucket), group=name, flattened=True).result(60)
        receiver.end()
        receiver.close()
        sender.shut()
    finally:
        sender.close()


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_pushed_weights_are_computed_with(model: Path, tmp_path: Path) -> None:
    other = other_weights(model, tmp_path / "other")
    before, after = (reference_logprobs(folder, SAMPLES) for folder in (model, other))
    assert difference(before, after) > 1e-2
    served = SlotModel(model, num_slots=2, context_length=64, dtype="fp32", fixed_shape=True)
    assert difference(logprobs(served, True), before) < TOLERANCE
    assert difference(logprobs(served, False), before) < TOLERANCE
    receiver = ModelReceiver(served.weights)
    tensors = load_file(other / "model.safetensors")
    push(tensors, other / "model.safetensors", receiver)
    assert receiver.digests() == {name: digest(tensor) for name, tensor in tensors.items()}
    assert difference(logprobs(served, True), after) < TOLERANCE
