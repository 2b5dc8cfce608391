"""Qwen3-MoE: Qwen3's attention, and experts behind a softmax router; no shared expert."""

from megarl.models.config_json import ConfigReader
from megarl.models.mapping import Rule
from megarl.models.qwen3 import ATTENTION
from megarl.models.rules import DENSE_MLP, EMBEDDING, EXPERTS, FINAL_NORM, HEAD, ROUTER
from megarl.models.spec import ModelSpec


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return (EMBEDDING, *ATTENTION, *DENSE_MLP, ROUTER, *EXPERTS, FINAL_NORM, HEAD)


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    experts = config.count("num_experts", "num_local_experts")
    topk = config.count("num_experts_per_tok")
    if topk > experts:
        config.complain("num_experts_per_tok", topk, f"at most num_experts={experts}")
    config.architecture("Qwen3MoeForCausalLM")
    config.only("scoring_func", "softmax")
    config.only("routed_scaling_factor", 1, 1.0)
    for key in ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"):
        config.only(key, 0)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    return ModelSpec(
        family="qwen3_moe",
        ffn=config.count("intermediate_size"),
        moe_ffn=config.count("moe_intermediate_size"),
        experts=experts,
        topk=topk,
        norm_topk_prob=config.flag("norm_topk_prob", default=False),
        moe_layers=_moe_layers(config, layers),
        **config.transformer(layers, head_dim=hidden // heads),
    )


def _moe_layers(config: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Layer l has experts if (l + 1) % decoder_sparse_step == 0 and mlp_only_layers lacks it."""
    step = config.count("decoder_sparse_step", default=1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not set(dense) <= set(range(layers)):
        accepted = f"a list of layers below num_hidden_layers={layers}"
        config.complain("mlp_only_layers", dense, accepted)
        dense = []
    pattern = tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
    if not any(pattern):
        found = f"{step} with mlp_only_layers={dense}"
        config.complain("decoder_sparse_step", found, "at least one layer of experts")
    return pattern
