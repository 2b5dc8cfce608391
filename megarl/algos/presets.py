"""The name table of policy objectives: the one place where a name becomes a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megarl.algos import sequence_surrogates, surrogates
from megarl.algos.ratio import Row, SequenceSums
from megarl.algos.surrogates import TokenLoss


@dataclass(frozen=True)
class Surrogate:
    """``compute(row, policy section)``. ``whole_sequences``: a token that is not finite spoils its
    sequence. ``uses_ratio``: whether there is a behaviour policy, hence ratios to report.
    ``reads_rollout``: it compares with the rollout server's log-probs. ``seq_flags(sums, policy
    section)``: name -> bool [S], reported as shares of trained sequences.
    """

    compute: Callable[[Row, Any], TokenLoss]
    whole_sequences: bool = False
    uses_ratio: bool = True
    reads_rollout: bool = False
    seq_flags: Callable[[SequenceSums, Any], dict[str, torch.Tensor]] = lambda sums, policy: {}


_CLIPPED = sequence_surrogates.clipped_sequences

SURROGATES: dict[str, Surrogate] = {
    "reinforce": Surrogate(surrogates.reinforce),
    "ppo_clip": Surrogate(surrogates.ppo_clip),
    "sapo": Surrogate(surrogates.sapo),
    "cispo": Surrogate(surrogates.cispo),
    "aspo": Surrogate(surrogates.aspo),
    "minirl": Surrogate(surrogates.minirl, reads_rollout=True),
    "kl_cov": Surrogate(surrogates.kl_cov),
    "gspo": Surrogate(sequence_surrogates.gspo, True, seq_flags=_CLIPPED),
    "gspo_token": Surrogate(sequence_surrogates.gspo_token, True, seq_flags=_CLIPPED),
    "gmpo": Surrogate(sequence_surrogates.gmpo, whole_sequences=True),
    "sft": Surrogate(surrogates.sft, uses_ratio=False),
}
