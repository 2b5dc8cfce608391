"""Received tensors in a live transformers module, against what save_pretrained writes to files."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.errors import SyncError
from megarl.models.live_weights import LiveWeights, hf_parameters
from megarl.ops import digest
from megarl.sync.receiver import ModelReceiver
from megarl.sync.stream import flatten, specs_of
from megarl.types import TensorSpec
from tests.helpers.families import save_model
from tests.sync.bucketing import bucketize
from tests.sync.sender import Sender

COUNTER = itertools.count()
WAIT_S = 30.0
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
    digests = ModelReceiver(LiveWeights(module)).digests()
    assert digests == {name: digest(tensor) for name, tensor in files.items()}


def test_experts_that_are_stacked_transposed_are_called_as_in_files(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model("gpt_oss", tmp_path)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    files, live = load_file(folder / "model.safetensors"), hf_parameters(module)
    assert live.keys() == files.keys() and "model.layers.3.mlp.experts.gate_up_proj_bias" in live
    assert all(torch.equal(live[name], tensor) for name, tensor in files.items())
    with torch.no_grad():
        live["model.layers.3.mlp.experts.down_proj"][2].fill_(3.0)
    assert (module.get_submodule("model.layers.3.mlp.experts").down_proj[2] == 3).all()


def test_a_view_writes_to_the_module() -> None:
    module = tiny(0)
    hf_parameters(module)[DOWN].fill_(3.0)
    experts = module.get_submodule("model.layers.1.mlp.experts")
    assert (experts.down_proj[2] == 3).all() and not (experts.down_proj[1] == 3).any()


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Pushed"]:
    folder = tmp_path_factory.mktemp("sent")
    tensors = files_of(tiny(1), folder)
    sender = Sender(folder / "model.safetensors")
    yield Pushed(tensors, sender)
    sender.close()


@dataclass
class Pushed:
    tensors: dict[str, torch.Tensor]
    sender: Sender


class Pair:
    """A receiver in a group with the sender."""

    def __init__(
        self, sent: Pushed, timeout_s: float = 20.0, weights: LiveWeights | None = None
    ) -> None:
        self.receiver = ModelReceiver(weights or LiveWeights(tiny(0)), timeout_s=timeout_s)
        self._sent = sent
        self.name = f"group{next(COUNTER)}"
        port = sent.sender.open(self.name)
        self.receiver.join_group(
            address="127.0.0.1", port=port, rank=1, world_size=2, name=self.name, backend="gloo"
        )

    def send(self, names: Iterable[str], flattened: bool = True) -> None:
        bucket = [(name, self._sent.tensors[name]) for name in names]
        self._sent.sender.send([name for name, _ in bucket], flattened=flattened)
        arrived = self.receiver.receive(specs_of(bucket), group=self.name, flattened=flattened)
        arrived.result(WAIT_S)


@pytest.fixture
def pair(sent: Pushed) -> Iterator[Pair]:
    made = Pair(sent)
    yield made
    made.receiver.close()
    sent.sender.shut()


@pytest.mark.parametrize("flattened", [True, False])
@pytest.mark.parametrize("max_bytes", [1, 3000, 10**9])
def test_a_push_arrives_bitwise_in_buckets_of_any_size(
    pair: Pair, sent: Pushed, max_bytes: int, flattened: bool
) -> None:
    pair.receiver.begin()
    for bucket in bucketize(sent.tensors.items(), max_bytes):
        pair.send([name for name, _ in bucket], flattened)
    pair.receiver.end()
    expected = {name: digest(tensor) for name, tensor in sent.tensors.items()}
    assert pair.receiver.digests() == expected


def test_buckets_may_be_fetched_before_others_are_taken(pair: Pair, sent: Pushed) -> None:
    """Into memory of their own, of which more may be there than they need."""
    pair.receiver.begin()
    fetched = []
    for bucket in bucketize(sent.tensors.items(), 10_000):
        sent.sender.send([name for name, _ in bucket], flattened=True)
        specs, room = specs_of(bucket), torch.empty(20_000, dtype=torch.uint8)
        flat = pair.receiver.fetch(specs, pair.name, room)
        assert flat.data_ptr() == room.data_ptr()
        fetched.append((specs, flat))
    assert len(fetched) > 2 and pair.receiver.digests() == {}
    for specs, flat in reversed(fetched):
        pair.receiver.take(specs, flat)
        flat.zero_()  # it has been copied
    pair.receiver.end()
    assert pair.receiver.digests() == {n: digest(t) for n, t in sent.tensors.items()}
    for name, tensor in sent.tensors.items():
        assert torch.equal(pair.receiver.weights.held[name], tensor), name


def test_a_bucket_that_does_not_fit_is_not_taken_at_all(pair: Pair, sent: Pushed) -> None:
    held = pair.receiver.weights.held
    before = {name: tensor.clone() for name, tensor in held.items()}
    pair.receiver.begin()
    good = next(iter(sent.tensors.items()))
    for bucket in ([good, ("model.x", torch.ones(2))], [good, (DOWN, torch.ones(12, 16))]):
        with pytest.raises(SyncError):
            pair.receiver.take(specs_of(bucket), flatten(bucket))
    with pytest.raises(SyncError, match="1 tensors has"):
        pair.receiver.take(specs_of([good]), flatten([good])[:-4])
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())
    assert pair.receiver.digests() == {}


class Waiting(LiveWeights):
    """Writes nothing until it may."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.may = threading.Event()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        assert self.may.wait(20.0)
        super().write(name, tensor)


def test_a_bucket_is_received_while_the_one_before_is_written(sent: Pushed) -> None:
    weights = Waiting(tiny(0))
    pair = Pair(sent, weights=weights)
    before = {name: tensor.clone() for name, tensor in weights.held.items()}
    buckets = [[name for name, _ in b] for b in bucketize(sent.tensors.items(), 3000)]
    pair.receiver.begin()
    for names in buckets[:2]:
        pair.send(names)
    assert all(torch.equal(weights.held[name], tensor) for name, tensor in before.items())
    for name in (buckets[0][0], buckets[1][0]):  # as though they were written
        spec = specs_of([(name, sent.tensors[name])])
        with pytest.raises(SyncError, match=f"{name} was received already"):
            pair.receiver.receive(spec, group=pair.name, flattened=True)
    weights.may.set()
    for names in buckets[2:]:
        pair.send(names)
    assert pair.receiver.digests() == {n: digest(t) for n, t in sent.tensors.items()}
    pair.receiver.end()
    for name, tensor in sent.tensors.items():
        assert torch.equal(weights.held[name], tensor), name
    pair.receiver.close()
    sent.sender.shut()


def test_a_bucket_of_one_sender_comes_while_that_of_another_is_awaited(
    pair: Pair, sent: Pushed
) -> None:
    names = list(sent.tensors)
    (late, early), group = (names[:9], names[9:]), "another"
    pair.receiver.join_group(
        **{"address": "127.0.0.1", "port": sent.sender.open(group), "rank": 1, "world_size": 2},
        **{"name": group, "backend": "gloo"},
    )

    def receive(names: list[str], group: str) -> Any:
        specs = specs_of([(name, sent.tensors[name]) for name in names])
        return pair.receiver.receive(specs, group=group, flattened=True)

    pair.receiver.begin()
    waits = receive(late, pair.name)
    arrives = receive(early, group)
    sent.sender.send(early, flattened=True)
    arrives.result(WAIT_S)
    assert not waits.done()
    sent.sender.send(late, flattened=True, group=pair.name)
    waits.result(WAIT_S)
    pair.receiver.end()
    assert pair.receiver.digests() == {n: digest(t) for n, t in sent.tensors.items()}


def test_a_bucket_that_cannot_be_written_fails_the_update_and_no_other(
    pair: Pair, sent: Pushed
) -> None:
    held = pair.receiver.weights.held
    good, held[DOWN] = held[DOWN], torch.zeros(()).expand(16, 12)  # all one number
    names = ["lm_head.weight", DOWN]
    pair.receiver.begin()
    pair.send(names)
    message = f"'{pair.name}': 2 tensors from {names[0]} on could not be written: .*single memory"
    norm = specs_of([("model.norm.weight", sent.tensors["model.norm.weight"])])
    for call in (
        pair.receiver.digests,
        lambda: pair.receiver.receive(norm, group=pair.name, flattened=True),
        pair.receiver.end,
    ):
        with pytest.raises(SyncError, match=message):
            call()
    known = pair.receiver.held()  # may be asked all the same: it is how the next push begins
    assert known == {names[0]: digest(sent.tensors[names[0]])}
    held[DOWN] = good
    pair.receiver.begin()
    pair.send(sent.tensors)
    pair.receiver.end()
    assert pair.receiver.digests() == {n: digest(t) for n, t in sent.tensors.items()}


def test_what_was_not_received_is_named(pair: Pair, sent: Pushed) -> None:
    missing = ["lm_head.weight", DOWN]
    pair.receiver.begin()
    pair.send([name for name in sent.tensors if name not in missing])
    message = f"2 of {len(sent.tensors)} were not received \\({missing[0]}, {missing[1]}\\)"
    with pytest.raises(SyncError, match=message):
        pair.receiver.end()
    pair.receiver.begin()
    pair.send(missing)
    pair.receiver.begin()  # the one that was left open is given up: everything has to come again
    pair.send(sent.tensors)
    pair.receiver.end()


def test_what_does_not_fit_is_refused_before_anything_is_received(pair: Pair) -> None:
    def refused(*specs: TensorSpec, group: str | None = None) -> str:
        with pytest.raises(SyncError) as caught:
            pair.receiver.receive(specs, group=group or pair.name, flattened=True)
        return str(caught.value)

    good = TensorSpec(DOWN, (16, 12), "float32")
    assert "no update is open" in refused(good)
    pair.receiver.begin()
    assert f"found 'h'; joined: '{pair.name}'" in refused(good, group="h")
    assert "empty bucket" in refused()
    assert "twice in one bucket" in refused(good, good)
    assert "model.x is not a weight" in refused(good, TensorSpec("model.x", (1,), "float32"))
    assert "found ((12, 16), 'float32')" in refused(TensorSpec(DOWN, (12, 16), "float32"))
    assert "found ((16, 12), 'bfloat16')" in refused(TensorSpec(DOWN, (16, 12), "bfloat16"))
    pair.send([DOWN])
    assert "received already" in refused(good)


def test_a_receive_ends_at_its_deadline_and_closes_the_group(sent: Pushed) -> None:
    pair = Pair(sent, timeout_s=0.5)
    pair.receiver.begin()
    spec = TensorSpec(DOWN, (16, 12), "float32")
    arrived = pair.receiver.receive([spec], group=pair.name, flattened=True)
    with pytest.raises(SyncError, match=r"1 tensors from .* within 0\.5 s, the group is closed"):
        arrived.result(WAIT_S)
    with pytest.raises(SyncError, match="joined: none"):
        pair.receiver.receive([spec], group=pair.name, flattened=True)
    sent.sender.shut()


def test_an_expert_layout_that_is_not_known_is_refused() -> None:
    module = tiny(0)
    module.get_submodule("model.layers.0.mlp.experts").is_concatenated = False
    with pytest.raises(SyncError, match=r"layers\.0\.mlp\.experts stacks its experts"):
        hf_parameters(module)
