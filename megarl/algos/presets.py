"""The name table of policy objectives: the one place where a name becomes a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.algos import sequence_surrogates, surrogates
from megarl.algos.ratio import Row
from megarl.algos.surrogates import TokenLoss


@dataclass(frozen=True)
class Surrogate:
    """``compute(row, policy section)``. ``whole_sequences``: a token that is not finite spoils its
    sequence. ``uses_ratio``: whether there is a behaviour policy, hence ratios to report.
    ``reads_rollout``: it compares with the rollout server's log-probs.
    """

    compute: Callable[[Row, Any], TokenLoss]
    whole_sequences: bool = False
    uses_ratio: bool = True
    reads_rollout: bool = False


SURROGATES: dict[str, Surrogate] = {
    "reinforce": Surrogate(surrogates.reinforce),
    "ppo_clip": Surrogate(surrogates.ppo_clip),
    "sapo": Surrogate(surrogates.sapo),
    "cispo": Surrogate(surrogates.cispo),
    "aspo": Surrogate(surrogates.aspo),
    "minirl": Surrogate(surrogates.minirl, reads_rollout=True),
    "kl_cov": Surrogate(surrogates.kl_cov),
    "gspo": Surrogate(sequence_surrogates.gspo, whole_sequences=True),
    "gspo_token": Surrogate(sequence_surrogates.gspo_token, whole_sequences=True),
    "gmpo": Surrogate(sequence_surrogates.gmpo, whole_sequences=True),
    "sft": Surrogate(surrogates.sft, uses_ratio=False),
}
