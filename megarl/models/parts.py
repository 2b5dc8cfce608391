"""The parts of a ModelSpec that only some families have."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary angles (Peng et al. 2023), names as in config.json.

    cos and sin are multiplied by ``m(mscale) / m(mscale_all_dim)``, and latent attention's scores
    by ``m(mscale_all_dim) ** 2``, with ``m(s) = 0.1 * s * ln(factor) + 1``.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # bounds of the ramp are whole dimensions


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling of rotary angles. Frequencies that turn less than ``low_turns`` times
    over the original positions are divided by ``factor``, those that turn more than ``high_turns``
    times are kept, and between them the share kept goes linearly with the number of turns.
    """

    factor: float
    low_turns: float  # low_freq_factor in config.json
    high_turns: float  # high_freq_factor
    original_positions: int


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: sizes of its projections. ``head_dim`` is nope + rope."""

    q_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6  # of the norms on the latents, which is not the layers'


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta-rule linear attention (Qwen3-Next)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
