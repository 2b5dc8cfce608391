"""What dense families have in common: a SwiGLU in every layer, and no experts."""

from typing import Any

from megarl.models.config_json import ConfigReader
from megarl.models.mapping import Rule
from megarl.models.rules import DENSE_MLP, FINAL_NORM, HEAD, PRE_MLP_NORM

BEHIND_ATTENTION: tuple[Rule, ...] = (PRE_MLP_NORM, *DENSE_MLP, FINAL_NORM, HEAD)


def feed_forward(config: ConfigReader, layers: int) -> dict[str, Any]:
    """The fields of ModelSpec that are about it."""
    return {
        "ffn": config.count("intermediate_size"),
        "moe_ffn": 0,
        "experts": 0,
        "topk": 0,
        "norm_topk_prob": False,
        "moe_layers": (False,) * layers,
    }
