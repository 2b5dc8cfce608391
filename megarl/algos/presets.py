"""The name table of policy objectives: the one place where a name becomes a function."""

from collections.abc import Callable
from typing import Any

from megarl.algos import surrogates
from megarl.algos.segments import Segments
from megarl.algos.surrogates import TokenLoss
from megarl.types import LossInputs

Surrogate = Callable[[LossInputs, Segments, Any], TokenLoss]

SURROGATES: dict[str, Surrogate] = {
    "reinforce": surrogates.reinforce,
    "ppo_clip": surrogates.ppo_clip,
    "gspo": surrogates.gspo,
    "sapo": surrogates.sapo,
    "sft": surrogates.sft,
}
