"""Which sample lies in which row, and what a row then holds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.packing import Payload, RowPlan, brought, build_row, plan_rows, routing_shape
from megarl.errors import DataError
from megarl.types import PackedBatch, Sample, SampleFacts


def sample(tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float] | None = None):
    return Sample(
        prompt_id="p",
        group=0,
        index=0,
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask, bool),
        rollout_logprobs=np.array(logprobs or [0.0] * len(tokens), np.float32),
        rewards=np.zeros(1, np.float32),
        correct=False,
        truncated=False,
    )


def assert_plan(
    plan: RowPlan,
    lengths: Sequence[int],
    *,
    row_tokens: int,
    dp: int,
    segment: int = 1,
    row: int = 1,
    rows: int = 1,
) -> None:
    """The promises of ``packing.py``, by their numbers there, and alignment."""
    assert len(plan.rows) == dp
    flat = [r for rank in plan.rows for r in rank]
    sizes = [sum(-(-lengths[i] // segment) * segment for i in r) for r in flat]
    assert all(size <= row_tokens for size in sizes)  # 2
    assert len({len(rank) for rank in plan.rows}) == 1  # 3
    assert len(plan.rows[0]) >= 1 and len(plan.rows[0]) % rows == 0
    assert len(plan.lengths) == len(plan.rows[0])  # 4
    assert len(set(plan.lengths)) == 1
    assert plan.lengths[0] >= max(sizes) and plan.lengths[0] > 0
    assert plan.lengths[0] < max([*sizes, 1]) + row  # and no longer than it must be
    assert plan.lengths[0] % row == 0
    placed = Counter(i for r in flat for i in r)
    assert placed == Counter(range(len(lengths)))  # 5, as multisets
    assert all(r == sorted(r) for r in flat)


def padding_share(plan: RowPlan, lengths: Sequence[int]) -> float:
    return 1 - sum(lengths) / (len(plan.rows) * sum(plan.lengths))


@pytest.mark.parametrize(
    ("lengths", "dp", "row_tokens"),
    [
        ([20 + i % 7 for i in range(206)], 4, 128),  # 206 samples do not divide by 4
        ([20, 30, 40], 4, 128),  # fewer samples than ranks
        ([], 2, 128),  # none at all
        ([900], 2, 1000),
        ([900, 900, 900, 900], 2, 1000),  # two do not fit one row
        ([1] * 9, 2, 1),  # rows of one token
        ([128], 1, 128),  # exactly full
    ],
)
def test_samples_are_placed_whatever_their_number(
    lengths: list[int], dp: int, row_tokens: int
) -> None:
    plan = plan_rows(lengths, row_tokens=row_tokens, dp=dp)
    assert_plan(plan, lengths, row_tokens=row_tokens, dp=dp)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    dp=st.integers(1, 5),
    cp=st.integers(1, 3),
    tp=st.integers(1, 3),
    rows=st.integers(1, 4),
    slack=st.integers(0, 100),
)
def test_every_plan_keeps_its_promises(
    lengths: list[int], dp: int, cp: int, tp: int, rows: int, slack: int
) -> None:
    segment = 2 * cp if cp > 1 else 1
    row = segment * tp
    row_tokens = max([-(-n // segment) * segment for n in lengths], default=1) + slack
    plan = plan_rows(
        lengths,
        row_tokens=row_tokens,
        dp=dp,
        segment_multiple=segment,
        row_multiple=row,
        rows_multiple=rows,
    )
    assert_plan(plan, lengths, row_tokens=row_tokens, dp=dp, segment=segment, row=row, rows=rows)


def test_light_and_heavy_ranks_run_the_same_number_of_rows() -> None:
    """Of lengths that one rank could not share: the others get rows without a sample."""
    plan = plan_rows([900], row_tokens=1000, dp=3)
    assert sorted(len(rank[0]) for rank in plan.rows) == [0, 0, 1]
    assert [len(rank) for rank in plan.rows] == [1, 1, 1]


@pytest.mark.parametrize(
    ("lengths", "needed", "count"),
    [([90] * 12, 6, 8), ([90] * 16, 8, 8), ([90], 1, 4), ([], 1, 4)],
)
def test_the_rows_of_a_rank_come_in_whole_groups(
    lengths: list[int], needed: int, count: int
) -> None:
    """Two of these samples need a row each for two ranks; groups of 4 rows make it up."""
    assert [len(rank) for rank in plan_rows(lengths, row_tokens=100, dp=2).rows] == [needed] * 2
    plan = plan_rows(lengths, row_tokens=100, dp=2, rows_multiple=4)
    assert [len(rank) for rank in plan.rows] == [count] * 2
    assert_plan(plan, lengths, row_tokens=100, dp=2, rows=4)
    assert sum(row == [] for rank in plan.rows for row in rank) == 2 * count - len(lengths)


def test_rows_are_even() -> None:
    """A slow rank is what the others wait for: with 256 samples little of any row is padding."""
    lengths = np.random.default_rng(0).integers(10, 200, 256).tolist()
    plan = plan_rows(lengths, row_tokens=2048, dp=4)
    assert padding_share(plan, lengths) < 0.05


def test_a_sample_longer_than_a_row_is_refused_with_the_settings_to_change() -> None:
    with pytest.raises(DataError) as error:
        plan_rows([5, 1001, 3, 2000], row_tokens=1000, dp=2)
    for fact in ("sample 1", "1001", "1000", "train.row_tokens", "2 such samples"):
        assert fact in str(error.value)


def test_a_sample_that_padding_makes_too_long_is_refused_with_its_padded_length() -> None:
    assert plan_rows([10], row_tokens=10, dp=1).lengths == [10]
    with pytest.raises(DataError, match=r"sample 0 has 10 tokens.*12.*a row holds 11"):
        plan_rows([10], row_tokens=11, dp=1, segment_multiple=4)


# --- rows -----------------------------------------------------------------------------------------

# The life of the sample in the docstring of types.py
TOKENS = [9, 16, 11, 17, 8, 20, 2, 14, 17, 8, 3, 12, 1]
TRAINED = [0] * 7 + [1] * 6
LOGPROBS = [0.0] * 7 + [-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]


def build(samples: list[Sample], length: int, multiple: int = 1) -> PackedBatch:
    return build_row(
        samples,
        range(len(samples)),
        length=length,
        segment_multiple=multiple,
        brings=brought(samples),
    )


def f32(values: Sequence[float]) -> list[float]:
    return np.array(values, np.float32).tolist()


def test_entry_t_of_a_row_is_about_token_t_plus_1() -> None:
    row = build([sample(TOKENS, TRAINED, LOGPROBS)], 13)
    assert row.tokens.tolist() == TOKENS
    assert row.targets.tolist() == [16, 11, 17, 8, 20, 2, 14, 17, 8, 3, 12, 1, 0]
    assert row.mask.tolist() == [False] * 6 + [True] * 6 + [False]
    assert row.valid.tolist() == [True] * 13
    assert row.positions.tolist() == list(range(13))
    assert row.rollout_logprobs.tolist() == f32([0] * 6 + LOGPROBS[7:] + [0])
    assert (row.cu_seqlens.tolist(), row.lengths.tolist(), row.samples) == ([0, 13], [13], (0,))
    for later in (row.advantages, row.weight):
        assert later.tolist() == [0] * 13
    for later in (row.old_logprobs, row.old_entropy, row.ref_logprobs, row.values, row.returns):
        assert later is None


def test_padding_belongs_to_no_sample() -> None:
    """Two samples of 3 and 5 tokens, each padded to 4k, in a row of 16."""
    samples = [sample([1, 2, 3], [0, 1, 1]), sample([4, 5, 6, 7, 8], [0, 0, 0, 1, 1])]
    row = build(samples, 16, multiple=4)
    assert row.tokens.tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0]
    assert row.targets.tolist() == [2, 3, 0, 0, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, *range(8), 0, 1, 2, 3]
    assert row.cu_seqlens.tolist() == [0, 4, 12, 16]
    assert row.lengths.tolist() == [3, 5, 0]
    assert row.valid.nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
    assert row.mask.nonzero().flatten().tolist() == [0, 1, 6, 7]
    for values in (row.weight, row.advantages, row.rollout_logprobs):
        assert (values[~row.mask] == 0).all()


def test_holes_in_the_mask_carry_nothing_even_if_the_sample_does() -> None:
    """Tokens of a tool's answer: in the row, seen by attention, never in a loss."""
    hole = sample([1, 2, 3, 4, 5, 6], [0, 1, 0, 0, 1, 1], [7.0, -1, float("nan"), 8.0, -2, -3])
    row = build([hole], 6)
    assert row.mask.tolist() == [True, False, False, True, True, False]
    assert row.valid.all()
    assert row.rollout_logprobs.tolist() == [-1, 0, 0, -2, -3, 0]
    assert row.spread(lambda i: 2.0).tolist() == [2, 0, 0, 2, 2, 0]


def test_what_samples_bring_lies_where_it_belongs() -> None:
    """Reference log-probs like log-probs; the value after token t before target t, which is the
    next one, and of the whole sequence: the last one is what a truncated response goes on from.
    """
    one = replace(
        sample([1, 2, 3], [0, 1, 1]),
        ref_logprobs=np.array([9, -1, -2], np.float32),
        values=np.array([0.5, 1.5, 2.5], np.float32),
    )
    two = replace(
        sample([4, 5], [0, 1]),
        ref_logprobs=np.array([9, -3], np.float32),
        values=np.array([3.5, 4.5], np.float32),
    )
    row = build([one, two], 8, multiple=4)
    assert row.ref_logprobs is not None and row.values is not None
    assert row.ref_logprobs.tolist() == [-1, -2, 0, 0, -3, 0, 0, 0]
    assert row.values.tolist() == [0.5, 1.5, 2.5, 0, 3.5, 4.5, 0, 0]


@pytest.mark.parametrize("name", ["values", "ref_logprobs"])
def test_samples_of_which_only_some_bring_something_are_refused(name: str) -> None:
    there = replace(sample([1, 2], [0, 1]), **{name: np.zeros(2, np.float32)})
    with pytest.raises(DataError, match=f"sample 1 has no {name}, others of its step have"):
        brought([there, sample([1, 2], [0, 1])])


def test_routing_of_only_some_or_of_several_kinds_is_refused() -> None:
    def routed(*shape: int, dtype: str = "uint8") -> SampleFacts:
        return replace(sample([1, 2], [0, 1]), routing=np.zeros((1, *shape), dtype)).facts

    assert routing_shape([routed(3, 2), routed(3, 2)]) == (3, 2, "uint8")
    assert routing_shape([]) is None
    for kinds in (
        [routed(3, 2), sample([1, 2], [0, 1]).facts],
        [sample([1], [0]).facts, routed(1)],
    ):
        with pytest.raises(DataError, match=r"sample [01] has no routing, others of its step have"):
            routing_shape(kinds)
    for other in (routed(4, 2), routed(3, 8), routed(3, 2, dtype="uint16")):
        with pytest.raises(DataError, match=r"uint8.*in a step; accepted: one kind"):
            routing_shape([routed(3, 2), other])


def test_a_row_of_payloads_holds_what_is_there_and_0_elsewhere() -> None:
    """The rows of all stages together are the row of the whole samples."""
    rng = np.random.default_rng(0)
    samples = [
        replace(
            sample(rng.integers(1, 9, n).tolist(), [0, *[1] * (n - 1)], rng.random(n).tolist()),
            values=rng.random(n).astype(np.float32),
            ref_logprobs=rng.random(n).astype(np.float32),
            routing=rng.integers(0, 8, (n - 1, 5, 2)).astype(np.uint8),
        )
        for n in (3, 1, 6)
    ]
    last = ("tokens", "mask", "rollout_logprobs", "values", "ref_logprobs")
    stages = [(("tokens",), slice(0, 2)), ((), slice(2, 4)), (last, slice(4, 5))]
    given = {"length": 16, "segment_multiple": 4, "brings": brought(samples)}
    whole = build_row(samples, [0, 1, 2], routing=(5, 2, "uint8"), **given)
    parts = []
    for names, layers in stages:
        payloads = {
            i: Payload(s.length, routing=s.routing[:, layers], **{n: getattr(s, n) for n in names})
            for i, s in enumerate(samples)
        }
        kind = (len(range(5)[layers]), 2, "uint8")
        parts.append(build_row(payloads, [0, 1, 2], routing=kind, **given))
    for name in ("positions", "cu_seqlens", "lengths", "valid"):
        assert all(torch.equal(getattr(part, name), getattr(whole, name)) for part in parts)
    for name in ("targets", "mask", "rollout_logprobs", "ref_logprobs", "values"):
        assert torch.equal(getattr(parts[2], name), getattr(whole, name))
        assert not getattr(parts[1], name).any()
    assert torch.equal(parts[0].tokens, whole.tokens) and not parts[1].tokens.any()
    assert torch.equal(torch.cat([part.routing for part in parts], 1), whole.routing)
    starts = whole.cu_seqlens.tolist()
    for i, s in enumerate(samples):
        at = slice(starts[i], starts[i] + s.length - 1)
        assert whole.routing[at].numpy().tolist() == s.routing.tolist()
        ends = starts[i] + s.length - 1, starts[i + 1]
        assert whole.routed[at].all() and not whole.routed[slice(*ends)].any()
    assert int(whole.routing.count_nonzero()) == sum(np.count_nonzero(s.routing) for s in samples)
    assert all(torch.equal(part.routed, whole.routed) for part in parts)


@pytest.mark.parametrize("wrong", [(4, 5, 2), (1, 5, 2), (6, 5, 2), (5, 4, 2), (5, 5, 3)])
def test_routing_of_other_tokens_is_refused_with_both_shapes(wrong: tuple[int, ...]) -> None:
    long = replace(sample([1] * 6, [0] * 6), routing=np.zeros(wrong, np.uint8))
    with pytest.raises(DataError, match=r"sample 0 of 6 tokens") as refusal:
        build_row([long], [0], length=8, routing=(5, 2, "uint8"))
    assert f"{wrong}; accepted: (5, 5, 2)" in str(refusal.value)


def test_values_of_a_sample_and_of_its_tokens_are_spread_over_its_segment() -> None:
    samples = [sample([1, 2, 3], [0, 1, 1]), sample([4, 5, 6, 7], [0, 1, 0, 1])]
    row = build(samples, 16, multiple=4)
    of_sample = row.spread(lambda i: i + 1.0)
    assert of_sample.tolist() == [1, 1, 0, 0, 2, 0, 2, 0, *[0] * 8]
    of_token = row.spread(lambda i: np.arange(len(samples[i].tokens)) + 10.0 * i)
    assert of_token.tolist() == [1, 2, 0, 0, 11, 0, 13, 0, *[0] * 8]
    assert row.of_segments([5.0, 7.0]).tolist() == [5, 7, 0]
    assert list(row.segments()) == [(0, 0, 3), (1, 4, 4)]


def test_a_row_without_samples_is_all_padding() -> None:
    row = build([], 8, multiple=4)
    assert not row.valid.any() and not row.mask.any()
    assert (row.cu_seqlens.tolist(), row.lengths.tolist(), row.samples) == ([0, 8], [0], ())
    assert row.weight.sum() == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data(), multiple=st.sampled_from([1, 4, 6]), extra=st.integers(0, 2))
def test_every_row_gives_its_samples_back(data: st.DataObject, multiple: int, extra: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    samples = []
    for n in lengths:
        mask = [False, *data.draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))]
        tokens = data.draw(st.lists(st.integers(0, 99), min_size=n, max_size=n))
        samples.append(sample(tokens, mask, [-0.5 * m for m in mask]))
    chosen = data.draw(st.permutations(range(len(samples))))
    size = sum(-(-n // multiple) * multiple for n in lengths) + extra * multiple
    row = build_row(samples, chosen, length=size, segment_multiple=multiple)
    of_sample = row.spread(float)
    bounds = row.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(row.tokens) == size
    assert all(b % multiple == 0 for b in bounds)
    assert row.samples == tuple(chosen)
    assert len(row.lengths) == len(bounds) - 1
    for k, i in enumerate(chosen):
        start, n = bounds[k], lengths[i]
        assert row.lengths[k] == n
        assert row.tokens[start : start + n].tolist() == samples[i].tokens.tolist()
        for t in range(n - 1):
            at = start + t
            assert row.targets[at] == samples[i].tokens[t + 1]
            assert row.mask[at] == samples[i].mask[t + 1]
            assert row.rollout_logprobs[at] == -0.5 * samples[i].mask[t + 1]
            assert of_sample[at] == i * samples[i].mask[t + 1]
        assert not row.mask[start + n - 1 : bounds[k + 1]].any()
    assert int(row.valid.sum()) == sum(lengths)
    assert int(row.mask.sum()) == sum(s.trained_tokens for s in samples)
