"""What an embedded server needs beside the weights that it serves while others come: two buckets at
most, however they come.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.models.live_weights import LiveWeights
from megarl.sync.packing import Packer
from megarl.sync.receiver import ModelReceiver
from megarl.sync.shared_memory import SharedMemory
from megarl.sync.stream import pieces, specs_of
from megarl.types import TensorSpec
from tests.sync.allocated import Allocated
from tests.sync.bucketing import bucketize
from tests.sync.sender import Sender
from tests.sync.test_receiver import files_of, tiny
from tests.sync.test_shared_memory import mapped

BUCKET = 48_000  # bytes; the model has 0.9 MB, its largest weight 16 kB
SIZES = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8}


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], Path]:
    folder = tmp_path_factory.mktemp("new")
    return files_of(tiny(1, **SIZES), folder), folder / "model.safetensors"


@pytest.fixture
def receiver(new: tuple[dict[str, torch.Tensor], Path]) -> Iterator[ModelReceiver]:
    made = ModelReceiver(LiveWeights(tiny(0, **SIZES)), timeout_s=60.0)
    yield made
    held = made.weights.held
    assert all(torch.equal(held[name], tensor) for name, tensor in new[0].items())
    made.close()


def test_over_a_group_it_holds_two_buckets_at_most(
    receiver: ModelReceiver, new: tuple[dict[str, torch.Tensor], Path]
) -> None:
    tensors, file = new
    assert sum(tensor.nbytes for tensor in tensors.values()) > 8 * BUCKET
    sender = Sender(file)
    try:
        port = sender.open("bounds")
        receiver.join_group(
            address="127.0.0.1", port=port, rank=1, world_size=2, name="bounds", backend="gloo"
        )
        with Allocated() as allocated:
            receiver.begin()
            for bucket in bucketize(tensors.items(), BUCKET):
                sender.send([name for name, _ in bucket], flattened=True)
                receiver.receive(specs_of(bucket), group="bounds", flattened=True).result(60)
            receiver.end()
        assert BUCKET / 2 < allocated.peak <= 2 * BUCKET
        sender.shut()
    finally:
        sender.close()


@pytest.mark.parametrize("max_bytes", [BUCKET, 1], ids=["buffers", "alone"])
def test_over_shared_memory_it_maps_two_buckets_and_allocates_no_third(
    receiver: ModelReceiver, new: tuple[dict[str, torch.Tensor], Path], max_bytes: int
) -> None:
    """The trainer's buffers, or memory of every group's own."""
    shared, largest = SharedMemory(), 0
    packer = Packer(max_bytes, torch.device("cpu"), allocate=shared.buffer)
    before, kept = len(mapped()), set[int]()
    with Allocated() as allocated:
        receiver.begin()
    for bucket in packer.pack(pieces([item] for item in new[0].items())):
        largest = max(largest, bucket.flat.numel())
        place = shared.message(bucket, None)["place"]  # type: ignore[arg-type]
        specs: tuple[TensorSpec, ...] = bucket.specs
        with Allocated() as more:
            receiver.receive_shared(specs, place)
        allocated.peak = max(allocated.peak, more.peak)
        del bucket
        kept.add(len(mapped()) - before)
    receiver.end()
    assert max(kept) <= 4  # two of the trainer's, and the same two in this process once more
    assert allocated.peak <= largest // 2
    del packer
    assert len(mapped()) == before
