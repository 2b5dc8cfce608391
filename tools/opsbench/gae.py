"""Benches of ``gae`` and of ``masked_moments`` with ``whiten``.

``vs_loop`` of gae: one sample after the other, in chunks of 128 tokens that are scanned at once by
a matrix product, the way slime does it, in float64 like ours; ``vs_padded``: the same on the padded
rectangle of all samples. Both know no mask and no rewards of masked tokens: they do less.

At 16M tokens an op that allocates its output waits for page faults first of all; with
THP_MEM_ALLOC_ENABLE=1 in the environment torch asks for pages of 2 MiB, and there are few.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megarl.ops import gae, gae_ref, masked_moments, masked_moments_ref, whiten, whiten_ref
from opsbench.measure import Call, Row, best_times, copy_call, ragged_lengths, threads

GAMMA, LAM, CHUNK = 0.99, 0.95, 128


def rows(quick: bool) -> Iterator[Row]:
    for num_tokens in (20_000,) if quick else (1 << 20, 1 << 24):
        yield from _gae_rows(num_tokens, rounds=2 if quick else 5)
    for num_tokens in (20_000,) if quick else (1 << 20, 1 << 24):
        yield from _moments_rows(num_tokens, rounds=2 if quick else 5)


def _gae_rows(num_tokens: int, rounds: int) -> Iterator[Row]:
    lengths = ragged_lengths(num_tokens)
    rewards, values, mask, cu_seqlens, bootstrap = _case(lengths)
    bounds = cu_seqlens.tolist()

    def native() -> object:
        return gae(rewards, values, mask, cu_seqlens, bootstrap, gamma=GAMMA, lam=LAM)

    def looped() -> object:
        parts = [
            chunked_gae(rewards[None, a:b], values[None, a:b], bootstrap[s : s + 1])
            for s, (a, b) in enumerate(pairwise(bounds))
        ]
        return torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts])

    def padded() -> object:
        def rectangle(x: Tensor) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(list(x.split(lengths)), batch_first=True)

        return chunked_gae(rectangle(rewards), rectangle(values), bootstrap)

    def reference() -> object:
        return gae_ref(rewards, values, mask, cu_seqlens, bootstrap, GAMMA, LAM)

    calls: dict[str, Call] = {"native": native, "loop": looped, "reference": reference}
    calls["copy"] = copy_call(num_tokens * (4 + 4 + 1 + 8 + 8))
    if num_tokens <= 1 << 20:  # beyond, the rectangle is several GB
        calls["padded"] = padded
    for count in (1, 2):
        with threads(count):
            took = best_times(calls, rounds)
        yield Row(
            "gae",
            "ragged",
            num_tokens,
            count,
            vs_padded=took["padded"] / took["native"] if "padded" in took else None,
            vs_loop=took["loop"] / took["native"],
            vs_reference=took["reference"] / took["native"],
            copy_bandwidth_fraction=took["copy"] / took["native"],
            seconds=took["native"],
        )


def chunked_gae(rewards: Tensor, values: Tensor, bootstrap: Tensor) -> tuple[Tensor, Tensor]:
    """[B, L] each, [B]: the backward recurrence as a forward one on flipped rows."""
    r, v = rewards.double(), values.double()
    after = torch.cat([v[:, 1:], bootstrap.double()[:, None]], 1)
    flipped = (r + GAMMA * after - v).flip(1)
    batch, length = flipped.shape
    decay = GAMMA * LAM
    chunks = torch.nn.functional.pad(flipped, (0, -length % CHUNK)).view(batch, -1, CHUNK)
    steps = torch.arange(CHUNK, dtype=torch.float64)
    inside = chunks @ torch.triu(decay ** (steps - steps[:, None]).clamp(min=0))
    powers = decay ** (steps + 1)
    carried = torch.zeros(batch, 1, dtype=torch.float64)
    for c in range(chunks.shape[1]):
        inside[:, c] += carried * powers
        carried = inside[:, c, -1:]
    advantages = inside.view(batch, -1)[:, :length].flip(1)
    return advantages, advantages + v


def _case(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Nine tokens in ten are trained, in runs, as with tool answers in between."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    rewards = torch.randn(num_tokens, generator=generator)
    values = torch.randn(num_tokens, generator=generator)
    runs = torch.rand(num_tokens // 64 + 1, generator=generator) < 0.9
    mask = runs.repeat_interleave(64)[:num_tokens].contiguous()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return rewards, values, mask, cu_seqlens, torch.randn(len(lengths), generator=generator)


def _moments_rows(num_tokens: int, rounds: int) -> Iterator[Row]:
    values, _, mask, _, _ = _case(ragged_lengths(num_tokens))
    calls: dict[str, Call] = {
        "native": lambda: masked_moments(values, mask),
        "reference": lambda: masked_moments_ref(values, mask),
        "select": lambda: torch.var_mean(values.double()[mask]),  # what one writes without it
        "copy": copy_call(num_tokens * 5),
        "whiten": lambda: whiten(values, mask, mean=0.1, variance=2.0, eps=1e-8),
        "whiten_reference": lambda: whiten_ref(values, mask, 0.1, 2.0, 1e-8),
        "whiten_copy": copy_call(num_tokens * 13),
    }
    for count in (1, 2):
        with threads(count):
            took = best_times(calls, rounds)
        yield Row(
            "masked_moments",
            "f32",
            num_tokens,
            count,
            vs_reference=took["reference"] / took["native"],
            copy_bandwidth_fraction=took["copy"] / took["native"],
            seconds=took["native"],
            note=f"{took['select'] / took['native']:.1f}x torch.var_mean of the selected",
        )
        yield Row(
            "whiten",
            "f32",
            num_tokens,
            count,
            vs_reference=took["whiten_reference"] / took["whiten"],
            copy_bandwidth_fraction=took["whiten_copy"] / took["whiten"],
            seconds=took["whiten"],
        )
