"""What families with DeepSeek-V3's feed-forward part have in common: dense first layers, then
experts behind a sigmoid router whose choice a bias moves, shared experts beside them, and
multi-token prediction layers behind the last.
"""

from typing import Any

from megarl.models.config_json import ConfigReader
from megarl.models.mapping import Rule
from megarl.models.rules import (
    DENSE_MLP,
    EXPERT_BIAS,
    EXPERTS,
    FINAL_NORM,
    HEAD_WITH_COPIES,
    MTP,
    PRE_MLP_NORM,
    ROUTER,
    SHARED_EXPERTS,
)

BEHIND_ATTENTION: tuple[Rule, ...] = (  # of a family's table, from there to its end
    PRE_MLP_NORM,
    *DENSE_MLP,
    ROUTER,
    EXPERT_BIAS,
    *EXPERTS,
    *SHARED_EXPERTS,
    *MTP,
    FINAL_NORM,
    HEAD_WITH_COPIES,
)

READS = ("num_nextn_predict_layers",)  # of ``config_json.HARMLESS``


def feed_forward(config: ConfigReader, layers: int) -> dict[str, Any]:
    """The fields of ModelSpec that are about it."""
    experts = config.count("n_routed_experts", "num_experts", "num_local_experts")
    topk = config.count("num_experts_per_tok", least=2)
    if topk > experts:
        config.complain("num_experts_per_tok", topk, f"at most n_routed_experts={experts}")
    dense = config.count("first_k_dense_replace", default=0, least=0)
    if dense >= layers:
        accepted = f"less than num_hidden_layers={layers}: no layer has experts"
        config.complain("first_k_dense_replace", dense, accepted)
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    config.only("moe_layer_freq", 1)
    moe_ffn = config.count("moe_intermediate_size")
    return {
        "ffn": config.count("intermediate_size"),
        "moe_ffn": moe_ffn,
        "experts": experts,
        "topk": topk,
        "norm_topk_prob": config.flag("norm_topk_prob", default=True),
        "moe_layers": tuple(layer >= dense for layer in range(layers)),
        "router_score": "sigmoid",
        "routed_scale": config.number("routed_scaling_factor"),
        **_groups(config, experts, topk),
        "expert_bias": True,
        "shared_ffn": moe_ffn * config.count("n_shared_experts"),
        "mtp_layers": config.count("num_nextn_predict_layers", default=0, least=0),
    }


def _groups(config: ConfigReader, experts: int, topk: int) -> dict[str, int]:
    """A group's score is the sum of its two best experts'. Megatron takes topk / topk_group of them
    instead, so that only where this is two is the choice the same.
    """
    groups = config.count("n_group", default=1)
    chosen = config.count("topk_group", default=1)
    if experts % groups:
        config.complain("n_group", groups, f"a divisor of n_routed_experts={experts}")
    elif chosen > groups:
        config.complain("topk_group", chosen, f"at most n_group={groups}")
    elif chosen < groups and (topk // chosen != 2 or topk > chosen * (experts // groups)):
        accepted = f"half of num_experts_per_tok={topk}, or n_group={groups} for no limit"
        config.complain("topk_group", chosen, accepted)
    return {"router_groups": groups, "router_topk_groups": chosen}
