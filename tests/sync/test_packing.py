"""Packing into flat buckets: every name once, groups whole, offsets that fit, bytes that last."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import SyncError
from megarl.ops import digest
from megarl.protocols import Bucket
from megarl.sync.packing import Packer
from megarl.sync.stream import pieces, unflatten

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64]
Shape = tuple[int, torch.dtype]


def groups_of(shapes: list[list[Shape]]) -> list[Bucket]:
    names = (f"w{i}" for i in itertools.count())
    numbers = torch.Generator().manual_seed(5)
    return [
        [
            (
                next(names),
                torch.randint(0, 256, (n * dtype.itemsize,), generator=numbers)
                .to(torch.uint8)
                .view(dtype),
            )
            for n, dtype in group
        ]
        for group in shapes
    ]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=3),
        max_size=12,
    ),
    st.sampled_from([1, 7, 16, 64, 300, 10**6]),
)
def test_every_name_once_groups_whole_and_every_byte_in_its_place(
    shapes: list[list[Shape]], max_bytes: int
) -> None:
    groups = groups_of(shapes)
    sent: list[list[str]] = []
    arrived: dict[str, torch.Tensor] = {}
    for bucket in Packer(max_bytes, CPU).pack(pieces(groups)):
        names = [spec.name for spec in bucket.specs]
        size = bucket.flat.numel()
        whole = [g for g in groups if g[0][0] in names]
        assert size <= max_bytes or len(whole) == 1
        assert sorted(names) == sorted(name for group in whole for name, _ in group)
        for name, tensor in unflatten(bucket.flat, bucket.specs):  # refuses what begins wrong
            arrived[name] = tensor.clone()
        assert bucket.digests == {name: digest(arrived[name]) for name in names}
        sent.append(names)
    everything = dict(item for group in groups for item in group)
    assert sorted(itertools.chain(*sent)) == sorted(everything)
    for name, tensor in everything.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name].view(torch.uint8), tensor.view(torch.uint8))


def sizes(*shapes: list[Shape], max_bytes: int) -> list[list[str]]:
    packer = Packer(max_bytes, CPU)
    return [
        [s.name for s in bucket.specs] for bucket in packer.pack(pieces(groups_of(list(shapes))))
    ]


def test_buckets_are_filled_in_order_and_what_is_larger_travels_alone() -> None:
    f = torch.float32
    alone = [[(2, f)], [(2, f)], [(1, f)], [(50, f)], [(1, f)], [(1, f)]]
    assert sizes(*alone, max_bytes=16) == [["w0", "w1"], ["w3"], ["w2", "w4", "w5"]]


def test_a_pair_is_never_cut_wherever_a_bucket_ends() -> None:
    pair = [(8, torch.float8_e4m3fn), (1, torch.float32)]  # codes and a scale, 12 bytes
    assert sizes(pair, pair, pair, max_bytes=30) == [["w1", "w0", "w3", "w2"], ["w5", "w4"]]
    assert sizes(pair, pair, max_bytes=5) == [["w1", "w0"], ["w3", "w2"]]


def test_a_wide_type_behind_odd_bytes_begins_the_next_bucket() -> None:
    odd, wide = [(3, torch.float8_e4m3fn)], [(1, torch.float32)]
    assert sizes(odd, wide, odd, max_bytes=10**6) == [["w0"], ["w1", "w2"]]


def test_a_bucket_under_way_keeps_its_bytes_while_the_next_is_filled() -> None:
    groups = groups_of([[(4, torch.float32)]] * 6)
    stream = Packer(16, CPU).pack(pieces(groups))
    under_way = next(stream)
    for k in range(1, 6):
        following = next(stream)
        assert torch.equal(under_way.flat.view(torch.float32), groups[k - 1][0][1])
        under_way = following
    assert len({bucket.data_ptr() for bucket in (under_way.flat, following.flat)}) == 1


def test_no_more_than_two_buckets_are_ever_held_and_tensors_are_read_one_group_ahead() -> None:
    groups = groups_of([[(4, torch.float32)]] * 8)
    taken = []
    packer = Packer(32, CPU)
    stream = packer.pack(pieces(taken.append(g[0][0]) or g for g in groups))
    places = {next(stream).flat.data_ptr()}
    assert taken == ["w0", "w1", "w2"]
    places |= {bucket.flat.data_ptr() for bucket in stream}
    assert len(places) == 2
    assert {buffer.numel() for buffer in packer._buffers} == {32}
    packer.free()
    assert packer._buffers == []


@pytest.mark.parametrize("where", [[["a", "b"], ["a"]], [["a", "a"]]])
def test_a_name_cannot_come_twice(where: list[list[str]]) -> None:
    groups = [[(name, torch.zeros(1)) for name in group] for group in where]
    with pytest.raises(SyncError, match="a was produced twice"):
        list(Packer(4, CPU).pack(pieces(groups)))
