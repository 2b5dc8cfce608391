"""Failures of other backends, group (b): packing, balancing and lengths. Each case with its
scenario and with further inputs of its kind.

B4 (no attention across packed samples) is here as far as rows go; with real models, logits and all,
it is in tests/actor/test_logprobs.py. B8 (the budget of a continued response) is in
tests/rollout/test_sampler.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.data.packing import build_row, local_index, padded, plan_rows
from megarl.data.prompts import DemonstrationStream, PromptStream, load_demonstrations, load_prompts
from megarl.data.tokenizer import Tokenizer
from megarl.errors import DataError
from megarl.mesh import Mesh
from megarl.types import Prompt, Sample
from tests.actor import compare
from tests.helpers.dist import WorkerPool
from tests.helpers.plans import completed, config_of


def sample(length: int, group: int = 0, index: int = 0, prompt: int = 2, seed: int = 0) -> Sample:
    rng = np.random.default_rng(1000 * seed + 97 * group + index)
    mask = np.arange(length) >= prompt
    return Sample(
        prompt_id=f"p{group}",
        group=group,
        index=index,
        tokens=rng.integers(1, 24, length).astype(np.int32),
        mask=mask,
        rollout_logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        rewards=np.array([1 + index], np.float32),
        correct=False,
        truncated=False,
    )


def samples_of(lengths: Sequence[int]) -> list[Sample]:
    return [sample(n, group=i // 2, index=i % 2) for i, n in enumerate(lengths)]


# --- B1: every rank runs the same number of microbatches -----------------------------------------

UNEVEN = [  # lengths, row_tokens, ranks, microbatches
    ([900, 900, 900, 900], 1000, 2, 2),
    ([900], 1000, 2, 1),
    ([900, 900, 900], 1000, 2, 2),
    ([1000, 1, 1, 1, 1], 1000, 4, 1),
    ([600] * 7, 1000, 3, 3),
    ([10] * 9 + [990] * 2, 1000, 8, 1),
]


@pytest.mark.parametrize(("lengths", "row_tokens", "dp", "count"), UNEVEN)
@pytest.mark.parametrize("buckets", [1, 3])
def test_b1_ranks_agree_on_the_number_and_the_lengths_of_microbatches(
    lengths: list[int], row_tokens: int, dp: int, count: int, buckets: int
) -> None:
    plan = plan_rows(lengths, row_tokens=row_tokens, dp=dp, buckets=buckets)
    assert [len(rank) for rank in plan.rows] == [count] * dp
    assert len(plan.lengths) == count
    assert Counter(i for rank in plan.rows for row in rank for i in row) == Counter(
        range(len(lengths))
    )


@pytest.mark.parametrize(("lengths", "row_tokens", "dp"), [case[:3] for case in UNEVEN])
def test_b1_rows_without_samples_weigh_and_count_nothing(
    lengths: list[int], row_tokens: int, dp: int
) -> None:
    config = config_of(
        algo={"policy": {"name": "gspo"}}, train={"row_tokens": row_tokens, "row_buckets": 2}
    )
    samples = samples_of(lengths)
    one, many = completed(samples, config), completed(samples, config, Mesh(dp=dp))
    rows = [row for rank in many for row in rank.plan.steps[0]]
    empty = [row for row in rows if not row.samples]
    assert len(empty) >= len(rows) - len(lengths)
    for row in empty:
        assert not row.valid.any() and not row.mask.any()
        assert (row.weight == 0).all() and (row.advantages == 0).all()
    total = sum(float(row.weight.double().sum()) for row in rows)
    assert total == pytest.approx(
        sum(float(row.weight.double().sum()) for row in one[0].plan.steps[0]), abs=1e-6
    )
    for rank in many:
        assert rank.plan.trained_tokens == one[0].plan.trained_tokens
        # Means hold their sums: those of one rank, whatever the number of rows.
        for metric, expected in zip(rank.metrics, one[0].metrics, strict=True):
            assert metric.name == expected.name
            assert vars(metric.value) == pytest.approx(vars(expected.value), rel=1e-6, abs=1e-9)


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("lengths", [[20], [30, 30, 30], [32, 3], [17, 17, 31, 31, 2]], ids=str)
def test_b1_a_rank_with_less_to_do_changes_no_gradient(
    pool: WorkerPool, tiny_model: Path, layout: dict[str, int], lengths: list[int]
) -> None:
    """Real Megatron over gloo: it ends, and with the gradients of one process."""
    algo = {"policy": {"name": "reinforce"}, "advantage": {"name": "grpo", "singleton": "raw"}}
    found = []
    for mesh in ({}, layout):
        results = pool.run(
            "tests.actor.work_split:gradients_of",
            world=compare.mesh_of(mesh).world_size,
            timeout_s=120,
            hf=tiny_model,
            layout=mesh,
            cases=[("b1", algo, samples_of(lengths), {"row_tokens": 32, "row_buckets": 2})],
        )
        found.append(compare.merged([r["b1"] for r in results])["gradients"])
    assert found[0].keys() == found[1].keys()
    assert max(float(gradient.abs().max()) for gradient in found[0].values()) > 1e-3
    for name, gradient in found[0].items():
        scale = max(1e-3, float(gradient.abs().max()))
        assert float((found[1][name] - gradient).abs().max()) < 2e-5 * scale, name


# --- B3: any number of samples over any number of ranks ------------------------------------------


@pytest.mark.parametrize(
    ("count", "dp"),
    [(206, 4), (3, 4), (0, 2), (249, 2), (1, 64), (17, 16), (1000, 7), (5, 5)],
)
@pytest.mark.parametrize("rows_multiple", [1, 4])
def test_b3_no_sample_is_lost_or_doubled_and_ranks_differ_little(
    count: int, dp: int, rows_multiple: int
) -> None:
    lengths = (10 + np.random.default_rng(count).integers(0, 90, count)).tolist()
    plan = plan_rows(lengths, row_tokens=256, dp=dp, rows_multiple=rows_multiple)
    assert Counter(i for rank in plan.rows for row in rank for i in row) == Counter(range(count))
    assert len({len(rank) for rank in plan.rows}) == 1
    assert len(plan.lengths) % rows_multiple == 0
    loads = [sum(lengths[i] for row in rank for i in row) for rank in plan.rows]
    assert max(loads) - min(loads) <= max(lengths, default=0)


# --- B4: packed samples are apart ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "multiple", "extra"),
    [([5, 3], 1, 0), ([5, 3], 4, 0), ([1, 1, 1], 2, 2), ([7], 1, 5), ([2, 9, 4, 4], 8, 16)],
)
def test_b4_positions_restart_and_bounds_separate_every_sample_and_the_padding(
    lengths: list[int], multiple: int, extra: int
) -> None:
    samples = [sample(n, index=i, prompt=1) for i, n in enumerate(lengths)]
    sizes = [padded(n, multiple) for n in lengths]
    row = build_row(
        samples, range(len(samples)), length=sum(sizes) + extra, segment_multiple=multiple
    )
    segments = [*sizes, *([extra] if extra else [])]
    assert row.cu_seqlens.tolist() == np.cumsum([0, *segments]).tolist()
    assert row.positions.tolist() == [t for n in segments for t in range(n)]
    # Altering one sample alters nothing of the row outside its own segment.
    for i, changed in enumerate(samples):
        other = [*samples]
        other[i] = Sample(**{**vars(changed), "tokens": (changed.tokens + 1).astype(np.int32)})
        again = build_row(
            other, range(len(other)), length=len(row.tokens), segment_multiple=multiple
        )
        start, end = row.cu_seqlens[i], row.cu_seqlens[i + 1]
        for name in ("tokens", "targets"):
            differs = getattr(again, name) != getattr(row, name)
            assert not differs[:start].any() and not differs[end:].any()


# --- B6: context-parallel shares -----------------------------------------------------------------


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "lengths", [[7], [16], [1, 2, 3], [64, 5], [33, 47, 129], [1] * 10], ids=str
)
def test_b6_shares_put_together_are_the_row(cp: int, lengths: list[int]) -> None:
    multiple = 2 * cp if cp > 1 else 1
    bounds = np.cumsum([0, *(padded(n, multiple) for n in lengths), 2 * multiple])
    total = int(bounds[-1])
    values = torch.arange(total)
    shares = [local_index(tuple(bounds.tolist()), cp, rank) for rank in range(cp)]
    assert {len(share) for share in shares} == {total // cp}
    back = torch.full((total,), -1)
    for share in shares:
        back[share] = values[share]
    assert torch.equal(back, values)
    if cp == 1:
        return
    for rank, share in enumerate(shares):  # the first and last of 2 * cp chunks of every sample
        expected = []
        for start, end in pairwise(bounds):
            chunks = np.arange(start, end).reshape(2 * cp, -1)
            expected += [*chunks[rank], *chunks[2 * cp - 1 - rank]]
        assert share.tolist() == expected


@pytest.mark.parametrize(("bounds", "cp"), [((0, 6), 2), ((0, 8, 9), 2), ((0, 16, 28), 4)])
def test_b6_lengths_that_cannot_be_cut_are_refused(bounds: tuple[int, ...], cp: int) -> None:
    with pytest.raises(AssertionError, match=f"is not cut by 2 \\* cp = {2 * cp}"):
        local_index(bounds, cp, 0)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("trained", [[0], [7], [3, 4], []], ids=str)
def test_b6_a_share_without_trained_tokens_is_a_share_like_others(
    cp: int, trained: list[int]
) -> None:
    mask = np.zeros(9, bool)
    mask[[t + 1 for t in trained]] = True
    row = build_row(
        [Sample(**{**vars(sample(9)), "mask": mask})], [0], length=16, segment_multiple=2 * cp
    )
    bounds = tuple(row.cu_seqlens.tolist())
    shares = [row.mask[local_index(bounds, cp, rank)] for rank in range(cp)]
    assert {len(share) for share in shares} == {16 // cp}
    assert sum(int(share.sum()) for share in shares) == len(trained)


# --- B11: more than an epoch has left ------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "asked", "epoch", "offset"),
    [
        (3, [8], 2, 2),
        (3, [2, 2], 1, 1),
        (1, [5], 5, 0),
        (7, [7], 1, 0),
        (5, [0, 4, 4, 4], 2, 2),
        (2, [1] * 9, 4, 1),
    ],
)
@pytest.mark.parametrize("kind", ["prompts", "demonstrations"])
def test_b11_a_request_goes_on_into_the_next_epochs(
    kind: str, items: int, asked: list[int], epoch: int, offset: int
) -> None:
    stream: Any
    if kind == "prompts":
        stream = PromptStream([Prompt(f"p{i}", (i,), {}) for i in range(items)], seed=1)
    else:
        stream = DemonstrationStream([sample(4, group=i) for i in range(items)], seed=1)
    taken = [stream.take(n) for n in asked]
    assert [len(part) for part in taken] == asked
    assert (stream.epoch, stream.offset) == (epoch, offset)
    flat = [item.id if kind == "prompts" else item.group for part in taken for item in part]
    for start in range(0, epoch * items, items):
        assert len(set(flat[start : start + items])) == items


@pytest.mark.parametrize("load", [load_prompts, load_demonstrations])
@pytest.mark.parametrize("text", ["", "\n", "  \n\t\n\n"])
def test_b11_an_empty_data_set_is_an_error_that_names_it(
    load: Callable[..., Any], text: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "nothing.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"nothing\.jsonl is empty"):
        load(path, tokenizer, 8)
