"""Received tensors in a live transformers module, against what save_pretrained writes to files."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.errors import SyncError
from megarl.sync.group import create_store, join_group, leave_group
from megarl.sync.receiver import ModelReceiver, hf_parameters
from megarl.sync.stream import bucketize, flatten, specs_of, tensor_digest
from megarl.types import TensorSpec

DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


def tiny(seed: int, **changes: Any) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 20,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes))).float()


def files_of(module: Any, folder: Path) -> dict[str, torch.Tensor]:
    module.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [0]}, {"tie_word_embeddings": True}])
def test_names_shapes_and_values_are_those_of_the_files(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    module = tiny(0, **changes)
    files, live = files_of(module, tmp_path), hf_parameters(module)
    assert live.keys() == files.keys()
    for name, tensor in files.items():
        assert torch.equal(live[name], tensor), name
    digests = ModelReceiver(module).digests()
    assert digests == {name: tensor_digest(tensor) for name, tensor in files.items()}


def test_a_view_writes_to_the_module() -> None:
    module = tiny(0)
    hf_parameters(module)[DOWN].fill_(3.0)
    experts = module.get_submodule("model.layers.1.mlp.experts")
    assert (experts.down_proj[2] == 3).all() and not (experts.down_proj[1] == 3).any()


class Pair:
    """A receiver and its sender in one process, in one gloo group."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.module = tiny(0)
        self.receiver = ModelReceiver(self.module, timeout_s=timeout_s)
        self._store, port = create_store("127.0.0.1", timeout_s=20)
        join = {"address": "127.0.0.1", "port": port, "rank": 1, "world_size": 2}
        self.pool = ThreadPoolExecutor(1)
        joined = self.pool.submit(
            self.receiver.join_group, **join, name="g", backend="gloo"
        )
        self.group = join_group(
            self._store, rank=0, world_size=2, group_name="g", backend="gloo", timeout_s=20
        )
        joined.result()

    def send(self, bucket: list[tuple[str, torch.Tensor]], flattened: bool = True) -> None:
        received = self.pool.submit(
            self.receiver.receive, specs_of(bucket), group="g", flattened=flattened
        )
        for tensor in [flatten(bucket)] if flattened else [t for _, t in bucket]:
            dist.broadcast(tensor.contiguous(), group=self.group, group_src=0)
        received.result()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.receiver.close()
    leave_group(made.group)


@pytest.mark.parametrize("flattened", [True, False])
@pytest.mark.parametrize("max_bytes", [1, 3000, 10**9])
def test_a_push_arrives_bitwise_in_buckets_of_any_size(
    pair: Pair, tmp_path: Path, max_bytes: int, flattened: bool
) -> None:
    sent = files_of(tiny(1), tmp_path)
    pair.receiver.begin()
    for bucket in bucketize(sent.items(), max_bytes):
        pair.send(bucket, flattened)
    pair.receiver.end()
    assert pair.receiver.digests() == {name: tensor_digest(t) for name, t in sent.items()}


def test_what_was_not_received_is_named(pair: Pair, tmp_path: Path) -> None:
    sent = files_of(tiny(1), tmp_path)
    total = len(sent)
    missing = [DOWN, "lm_head.weight"]
    pair.receiver.begin()
    pair.send([(name, t) for name, t in sent.items() if name not in missing])
    with pytest.raises(SyncError, match=f"2 of {total} were not received \\(lm_head.weight, {DOWN}"):
        pair.receiver.end()
    pair.receiver.begin()  # one that was left open is given up: everything has to come again
    pair.send([(name, sent[name]) for name in missing])
    pair.receiver.begin()
    pair.send(list(sent.items()))
    pair.receiver.end()


def test_what_does_not_fit_is_refused_before_anything_is_received(pair: Pair) -> None:
    def refused(*specs: TensorSpec, group: str = "g") -> str:
        with pytest.raises(SyncError) as caught:
            pair.receiver.receive(specs, group=group, flattened=True)
        return str(caught.value)

    good = TensorSpec(DOWN, (16, 12), "float32")
    assert "no update is open" in refused(good)
    pair.receiver.begin()
    assert "found 'h'; joined: 'g'" in refused(good, group="h")
    assert "empty bucket" in refused()
    assert "twice in one bucket" in refused(good, good)
    assert "model.x is not a weight" in refused(good, TensorSpec("model.x", (1,), "float32"))
    assert "found ((12, 16), 'float32')" in refused(TensorSpec(DOWN, (12, 16), "float32"))
    assert "found ((16, 12), 'bfloat16')" in refused(TensorSpec(DOWN, (16, 12), "bfloat16"))
    pair.send([(DOWN, torch.zeros(16, 12))])
    assert "received already" in refused(good)


def test_a_receive_ends_at_its_deadline_and_closes_the_group() -> None:
    pair = Pair(timeout_s=0.5)
    pair.receiver.begin()
    spec = TensorSpec(DOWN, (16, 12), "float32")
    with pytest.raises(SyncError, match=r"'g': 1 tensors from .* within 0\.5 s, the group is closed"):
        pair.receiver.receive([spec], group="g", flattened=True)
    with pytest.raises(SyncError, match="joined: none"):
        pair.receiver.receive([spec], group="g", flattened=True)
    leave_group(pair.group)


def test_an_expert_layout_that_is_not_known_is_refused() -> None:
    module = tiny(0)
    module.get_submodule("model.layers.0.mlp.experts").is_transposed = True
    with pytest.raises(SyncError, match="layers.0.mlp.experts stacks its experts"):
        hf_parameters(module)
