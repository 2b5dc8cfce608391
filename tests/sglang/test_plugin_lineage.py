"""Which names come to lie in a model, whatever a loader does with them on the way."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

Loader = Callable[[torch.nn.Module, dict[str, torch.Tensor]], None]


class Target(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.stacked = torch.nn.Parameter(torch.zeros(3, 8, 6), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("bias", torch.zeros(4, dtype=torch.bfloat16))
        self.other = [torch.zeros(4, 6)]  # no part of the model's state


def in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def cat(model, t):
    model.w.data.copy_(torch.cat([t["top"], t["bottom"]]))


def cat_and_slice(model, t):
    model.w.data[:2].copy_(torch.cat([t["top"], t["bottom"]])[2:])


def experts(model, t):
    gate, up = model.stacked.data[1].narrow(0, 0, 4), model.stacked.data[1][4:]
    gate.copy_(t["a"])
    up[:2].copy_(t["b"].narrow(0, 2, 2))


def cast(model, t):
    model.bias.copy_(t["vector"].to(torch.bfloat16).contiguous() * 2)


def transposed(model, t):
    model.w.data.copy_(t["tall"].t().contiguous().clone())


def number(model, t):
    model.scale.data.fill_(t["one"].item())


def number_late(model, t):
    value = t["one"].item()
    model.w.data.copy_(t["a"])
    model.scale.data.fill_(value + 1)


def staged(model, t):
    """Every other column of a buffer, then all of it."""
    buffer = torch.empty(4, 12)
    buffer[:, ::2].copy_(t["a"])
    buffer[:, 1::2] = t["b"]
    model.w.data.copy_(buffer[:, :6])


def staged_over(model, t):
    buffer = torch.empty(4, 6)
    buffer.copy_(t["a"])
    buffer.copy_(t["b"])
    model.w.data.copy_(buffer)


def exchanged(model, t):
    model.w.data = torch.stack([t["a"][0], t["a"][1]]) + 1


def several(model, t):
    torch._foreach_copy_([model.w.data, model.other[0]], [t["a"], t["b"]])


def out_of(model, t):
    torch.add(t["a"], t["b"], out=model.w.data)


def cleared(model, t):
    model.w.data.copy_(t["a"].zero_())


def read_only(model, t):
    model.w.data.copy_(torch.full((4, 6), float(t["a"].sum() > 0)))
    _ = t["b"] * 2


def elsewhere(model, t):
    model.other[0].copy_(t["a"])


def freed(model, t):
    """What is computed next may lie where something else lay."""
    for _ in range(50):
        del_me = t["a"] * 2
        del del_me
        model.w.data.copy_(torch.ones(4, 6))


LOADERS: list[tuple[Loader, set[str], set[str]]] = [  # what it does, names taken, and into what
    (cat, {"top", "bottom"}, {"w"}),
    (cat_and_slice, {"top", "bottom"}, {"w"}),  # of what is made of several all count
    (experts, {"a", "b"}, {"stacked"}),
    (cast, {"vector"}, {"bias"}),
    (transposed, {"tall"}, {"w"}),
    (number, {"one"}, {"scale"}),
    (number_late, {"a"}, {"w"}),
    (staged, {"a", "b"}, {"w"}),
    (staged_over, {"b"}, {"w"}),
    (exchanged, {"a"}, {"w"}),
    (several, {"a", "b"}, {"w"}),  # all that one operation reads
    (out_of, {"a", "b"}, {"w"}),
    (cleared, set(), set()),
    (read_only, set(), set()),
    (elsewhere, set(), set()),
    (freed, set(), set()),
]


def given_tensors() -> dict[str, torch.Tensor]:
    """Views of one flat buffer, as they come from a bucket, and one without elements."""
    shapes = {"top": (2, 6), "bottom": (2, 6), "a": (4, 6), "b": (4, 6), "vector": (4,)}
    shapes |= {"tall": (6, 4), "one": (1,), "unused": (5,), "empty": (0, 3)}
    flat, at, tensors = torch.arange(1.0, 200.0), 0, {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = flat[at : at + size].view(shape)
        at += size
    return tensors


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    "loader, taken, written", LOADERS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_name_is_taken_if_and_only_if_its_bytes_come_to_lie_in_the_model(
    plugin,
    loader,
    taken,
    written,
    threads,
):
    """And the model is what it is without anybody watching."""
    expected, model, tensors = Target(), Target(), given_tensors()
    loader(expected, given_tensors())

    def load() -> None:
        if not threads:
            return loader(model, tensors)
        with ThreadPoolExecutor(2) as pool:
            pool.submit(plugin.watched(loader), model, tensors).result()

    watch = plugin.lineage.Watch(model)
    for name, tensor in tensors.items():
        watch.give(name, tensor)
    plugin.records.watching(watch, load)
    assert watch.taken == {*taken, "empty"} and watch.written == written
    for name, value in expected.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert torch.equal(expected.other[0], model.other[0])


def test_what_an_unwatched_thread_writes_is_not_seen(plugin):
    """So a thread has to be told: there is no other way to know."""
    model, tensors = Target(), given_tensors()
    watch = plugin.lineage.Watch(model)
    watch.give("a", tensors["a"])
    plugin.records.watching(watch, in_thread, lambda: model.w.data.copy_(tensors["a"]))
    assert watch.taken == set()
    assert plugin.watched(in_thread) is in_thread  # nothing runs: as it is


def test_nothing_is_seen_where_nobody_wants_it(plugin):
    model, tensors = Target(), given_tensors()
    watch = plugin.lineage.Watch(model)
    watch.give("a", tensors["a"])

    def load() -> None:
        with plugin.lineage.unseen():
            model.w.data.copy_(tensors["a"])

    plugin.records.watching(watch, load)
    assert watch.taken == set()


def test_two_parameters_in_one_piece_of_memory_are_told_apart(plugin):
    model, flat = torch.nn.Module(), torch.zeros(8)
    model.low = torch.nn.Parameter(flat[:4], requires_grad=False)
    model.high = torch.nn.Parameter(flat[4:], requires_grad=False)
    watch, source = plugin.lineage.Watch(model), torch.ones(4)
    watch.give("a", source)
    plugin.records.watching(watch, model.high.data.copy_, source)
    assert (watch.taken, watch.written) == ({"a"}, {"high"})


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.sampled_from("abc-"))))
def test_memory_knows_of_every_byte_who_put_it_there_last(plugin, puts):
    memory, plain = plugin.lineage.Memory(), dict.fromkeys(range(50), "-")
    for start, size, name in puts:
        memory.put(start, start + size, frozenset() if name == "-" else frozenset(name))
        plain |= dict.fromkeys(range(start, start + size), name)
        for at in range(0, 45):
            for end in (at + 1, at + 4):
                assert memory.names(at, end) == {plain[k] for k in range(at, end)} - {"-"}
