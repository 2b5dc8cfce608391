"""Rotary angles of packed rows, plain, of a part of the head, YaRN's or Llama 3.1's."""

import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.models.parts import Llama3, Yarn
from megarl.models.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """f32 [size / 2]: the angle that a position adds to each pair of ``size`` turned dimensions.

    Plain: ``f_i = theta ** (-2i / size)``.
    """
    size, theta = turned_dims(spec), spec.rope_theta
    plain = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    if spec.yarn:
        return _yarn(plain, theta, spec.yarn)
    return _llama3(plain, spec.llama3) if spec.llama3 else plain


def _yarn(plain: torch.Tensor, theta: float, yarn: Yarn) -> torch.Tensor:
    """YaRN divides by ``factor`` the frequencies that turn less than ``beta_slow`` times over the
    original positions, keeps those that turn more than ``beta_fast`` times, and goes from one to
    the other linearly in i (Peng et al. 2023, section 3.2).
    """
    size = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        wavelength = yarn.original_positions / (times * 2 * math.pi)
        return size * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    span = high - low or 0.001
    divided = ((torch.arange(size // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / yarn.factor * divided + plain * (1 - divided)


def _llama3(plain: torch.Tensor, scaling: Llama3) -> torch.Tensor:
    """As ``parts.Llama3`` says."""
    turns = scaling.original_positions * plain / (2 * math.pi)
    span = scaling.high_turns - scaling.low_turns
    kept = ((turns - scaling.low_turns) / span).clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def turned_dims(spec: ModelSpec) -> int:
    """How many of a head's dimensions are turned."""
    return spec.mla.rope_dim if spec.mla else int(spec.head_dim * spec.rope_share)


def cos_factor(yarn: Yarn | None) -> float:
    """What cos and sin are multiplied by (``parts.Yarn``)."""
    if yarn is None or yarn.factor <= 1:
        return 1.0
    return _mscale(yarn, yarn.mscale) / _mscale(yarn, yarn.mscale_all_dim)


def _mscale(yarn: Yarn, scale: float) -> float:
    return 0.1 * scale * math.log(yarn.factor) + 1.0


class PackedRotaryEmbedding(torch.nn.Module):
    """Angles for a whole packed row at once, restarting at 0 in every segment.

    Upstream applies rotary embeddings segment by segment in Python unless the angles cover exactly
    the row; then it slices them at the segments' bounds. Covering the row makes it one operation,
    with the same angles.
    """

    def __init__(self, spec: ModelSpec, *, with_factor: bool = False) -> None:
        """``with_factor``: angles come with ``cos_factor``, as latent attention takes YaRN's."""
        super().__init__()
        # no buffer, which a model in bf16 would round
        self.inv_freq = inverse_frequencies(spec)
        self.factor = cos_factor(spec.yarn) if with_factor else None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        """The packing itself stands in for the length; ``forward`` receives it."""
        return next(a for a in (*args, *kwargs.values()) if isinstance(a, PackedSeqParams))

    def forward(self, packing: PackedSeqParams, *args: Any, **kwargs: Any) -> Any:
        """f32 [T, 1, 1, turned dims], of the whole row also under context parallelism."""
        cu = packing.cu_seqlens_q.long()
        lengths = cu[1:] - cu[:-1]
        positions = torch.arange(int(cu[-1]), device=cu.device) - cu[:-1].repeat_interleave(lengths)
        angles = torch.outer(positions.float(), self.inv_freq.to(cu.device))
        whole = torch.cat([angles, angles], dim=-1)[:, None, None, :]
        return whole if self.factor is None else (whole, self.factor)
