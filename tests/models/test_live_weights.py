"""Writing tensors into a live module: what is there afterwards, and its digest."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.errors import SyncError
from megarl.models.hf_fp8 import Fp8Blocks
from megarl.models.live_weights import LiveWeights
from megarl.ops import digest_partial_ref, finish
from megarl.sync.stream import specs_of

SHAPES = [(), (3,), (700_001,), (513, 1025), (3, 700, 401), (1, 600_000), (0, 4)]


def module_of(tensors: dict[str, Tensor]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return module


def random(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(s, generator=generator).to(dtype) for i, s in enumerate(shapes)}


def by_definition(tensor: Tensor) -> str:
    partial = digest_partial_ref(tensor, tensor.shape, [0] * tensor.dim())
    return finish(partial, tensor.dtype, tensor.shape)


def write(weights: LiveWeights, tensors: dict[str, Tensor]) -> None:
    weights.begin()
    weights.check(specs_of(list(tensors.items())))
    for name, tensor in tensors.items():
        weights.write(name, tensor)
    weights.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_of_any_size_are_written_and_digested(dtype: torch.dtype) -> None:
    module = module_of(random(SHAPES, dtype, 0))
    weights, new = LiveWeights(module), random(SHAPES, dtype, 1)
    write(weights, new)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, new[name]), name
    assert weights.digests() == {name: by_definition(t) for name, t in new.items()}


def test_parts_of_a_stack_are_written_where_they_are() -> None:
    """A transposed or sliced place is no run of memory."""
    base = torch.zeros(4, 600, 300)
    weights = LiveWeights(torch.nn.Linear(1, 1))
    weights.held = {"across": base[:, :, :7], "turned": base[1].t()}
    new = {"across": torch.randn(4, 600, 7), "turned": torch.randn(300, 600)}
    write(weights, {"across": new["across"]} | {"turned": new["turned"]})
    assert torch.equal(base[1].t(), new["turned"])
    assert torch.equal(base[2, :, :7], new["across"][2]) and not base[0, :, 7:].any()


def test_a_digest_is_of_what_lies_in_place_and_not_of_what_came() -> None:
    module = module_of(random([(1000, 700), (5,)], torch.bfloat16, 0))
    weights, new = LiveWeights(module), random([(1000, 700), (5,)], torch.float32, 1)
    weights.begin()
    for name, tensor in new.items():
        weights.write(name, tensor)
    weights.end()
    assert weights.digests() == {name: by_definition(t.bfloat16()) for name, t in new.items()}


def test_before_an_update_digests_are_of_what_there_is() -> None:
    tensors = random([(20, 30), (4,)], torch.float32, 0)
    weights = LiveWeights(module_of(tensors))
    assert weights.digests() == {name: by_definition(t) for name, t in tensors.items()}


def test_during_an_update_digests_are_of_what_has_come() -> None:
    """A sender that compares too early, or after a failure, finds what is missing."""
    weights = LiveWeights(module_of(random([(4,), (6,)], torch.float32, 0)))
    weights.digests()
    new = random([(4,), (6,)], torch.float32, 1)
    weights.begin()
    assert weights.digests() == {}
    weights.write("w1", new["w1"])
    with pytest.raises(SyncError, match=r"1 of 2 were not received \(w0\)"):
        weights.end()
    assert weights.digests() == {"w1": by_definition(new["w1"])}


def test_what_is_held_is_known_beyond_the_update_it_came_in() -> None:
    weights = LiveWeights(module_of(random([(4,), (600_000,)], torch.float32, 0)))
    assert weights.known() == {}  # nothing is read for it
    first = random([(4,), (600_000,)], torch.float32, 1)
    write(weights, first)
    second = random([(4,), (600_000,)], torch.float32, 2)
    weights.begin()
    weights.write("w1", second["w1"])
    assert weights.known() == {"w0": by_definition(first["w0"]), "w1": by_definition(second["w1"])}
    weights.forget()
    assert weights.known() == {} == weights.digests()
    with pytest.raises(SyncError, match="no update is open"):
        weights.end()


def test_what_was_digested_when_it_was_asked_for_is_known() -> None:
    tensors = random([(4,), (6,)], torch.float32, 0)
    weights = LiveWeights(module_of(tensors))
    assert weights.digests() == weights.known() == {n: by_definition(t) for n, t in tensors.items()}


def test_a_tensor_may_be_made_of_what_is_held() -> None:
    old = random([(4,), (6,)], torch.float32, 0)
    weights = LiveWeights(module_of(old))
    weights.begin()
    weights.write("w0", old["w0"])
    seen = []

    def double(place: Tensor, held: str | None) -> None:
        seen.append(held)
        place.mul_(2)

    weights.change("w1", double)
    weights.end()
    assert torch.equal(weights.held["w1"], old["w1"] * 2)
    assert weights.digests() == {n: by_definition(weights.held[n]) for n in old}
    weights.begin()
    weights.change("w1", double)
    assert seen == [None, by_definition(old["w1"] * 2)]


def test_of_a_change_that_fails_nothing_is_known() -> None:
    weights = LiveWeights(module_of(random([(4,)], torch.float32, 0)))
    weights.digests()
    weights.begin()

    def fails(place: Tensor, held: str | None) -> None:
        raise SyncError("not for this one")

    with pytest.raises(SyncError, match="not for this one"):
        weights.change("w0", fails)
    assert weights.known() == {} == weights.digests()


def test_a_write_that_fails_half_way_is_not_known() -> None:
    weights = LiveWeights(module_of(random([(600_000,)], torch.float32, 0)))
    weights.digests()
    weights.begin()
    with pytest.raises(RuntimeError):
        weights.write("w0", torch.zeros(300_000))
    assert weights.known() == {}


class Model(torch.nn.Module):
    """Of two layers, as transformers has them."""

    class Config:
        num_hidden_layers = 2

    def __init__(self) -> None:
        super().__init__()
        self.config = Model.Config()
        self.model = torch.nn.Module()
        layers = [module_of({"weight": torch.zeros(300, 200)}) for _ in range(2)]
        self.model.layers = torch.nn.ModuleList(layers)


ONE, BEHIND = "model.layers.1.weight", "model.layers.2.weight"


def in_fp8(*codes: str) -> LiveWeights:
    return LiveWeights(Model(), blocks=Fp8Blocks((128, 128), ()), codes=codes)


def test_weights_in_codes_are_two_tensors_with_shapes_of_their_own() -> None:
    weights = in_fp8(ONE, BEHIND)
    found: dict[str, Any] = {n: (str(t.dtype), tuple(t.shape)) for n, t in weights.held.items()}
    assert found == {
        "model.layers.0.weight": ("torch.float32", (300, 200)),
        ONE: ("torch.float8_e4m3fn", (300, 200)),
        f"{ONE}_scale_inv": ("torch.float32", (3, 2)),
    }
    assert weights.codes == {ONE} and list(weights.names()) == ["model.layers.0.weight", ONE]


def test_codes_that_the_model_has_not_are_refused() -> None:
    with pytest.raises(SyncError, match=r"model\.other is in FP8, but is not a weight"):
        in_fp8(ONE, "model.other")


def test_layers_behind_the_last_are_digested_and_dropped() -> None:
    weights = in_fp8()
    new = {name: torch.ones(300, 200) for name in weights.held}
    write(weights, {**new, BEHIND: torch.ones(3)})
    assert weights.digests()[BEHIND] == by_definition(torch.ones(3))
    weights.begin()
    with pytest.raises(SyncError, match=r"model\.layers\.2x is not a weight"):
        weights.check(specs_of([("model.layers.2x", torch.ones(3))]))
