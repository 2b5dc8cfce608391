"""What Transformer Engine's layers call their parameters (megatron-core 0.19.2, Transformer Engine
2.20.2), written down by family: not derived from the mapping that is tested against it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

_GROUPED_QUERIES = (
    "linear_qkv.layer_norm_weight",
    "linear_qkv.weight",
    "linear_proj.weight",
)
_QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")
_LATENT_KEYS = (
    "linear_kv_down_proj.weight",
    "linear_kv_up_proj.layer_norm_weight",
    "linear_kv_up_proj.weight",
    "linear_proj.weight",
)
_LATENT_QUERIES = (
    "linear_q_down_proj.weight",
    "linear_q_up_proj.layer_norm_weight",
    "linear_q_up_proj.weight",
)
ATTENTION = {
    "qwen3": (*_GROUPED_QUERIES, *_QK_NORMS),
    "qwen3 yarn tied": (*_GROUPED_QUERIES, *_QK_NORMS),
    "qwen3_moe yarn": (*_GROUPED_QUERIES, *_QK_NORMS),
    "qwen3_moe tied": (*_GROUPED_QUERIES, *_QK_NORMS),
    "deepseek_v3": (*_LATENT_QUERIES, *_LATENT_KEYS),
    "deepseek_v3 direct queries": ("linear_q_proj.weight", *_LATENT_KEYS),
    "glm4_moe": (*_GROUPED_QUERIES, "linear_qkv.bias", *_QK_NORMS),
    "glm4_moe without qk norm": (*_GROUPED_QUERIES, "linear_qkv.bias"),
    "gpt_oss": (
        *(*_GROUPED_QUERIES, "linear_qkv.bias", "linear_proj.bias"),
        "core_attention.softmax_offset",
    ),
}
ATTENTION["gpt_oss without yarn"] = ATTENTION["gpt_oss"]
ATTENTION |= dict.fromkeys(("llama", "mistral"), _GROUPED_QUERIES)
ATTENTION |= dict.fromkeys(("qwen2", "qwen2 windows tied"), ATTENTION["glm4_moe without qk norm"])
ATTENTION["llama biases tied"] = (*ATTENTION["qwen2"], "linear_proj.bias")
ATTENTION["kimi_k2"] = ATTENTION["deepseek_v3"]

EXPERTS = 8  # of every model of tests/helpers/families.py that has them
DENSE_LAYERS = {"qwen3_moe": {1}, "gpt_oss": set()}
SIGMOID = ("deepseek_v3", "kimi_k2", "glm4_moe")
DENSE_LAYERS |= {family: {0} for family in SIGMOID}


def parameter_names(model: str, hf: Path, *, grouped: bool, stages: int) -> set[str]:
    """Of ``families.MODELS[model]``, saved in ``hf``."""
    config = json.loads((hf / "config.json").read_text())
    family, layers = config["model_type"], config["num_hidden_layers"]
    names = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
    if not config["tie_word_embeddings"] or stages > 1:  # tied, the last stage has a copy
        names.add("output_layer.weight")
    for layer in range(layers):
        moe = family in DENSE_LAYERS and layer not in DENSE_LAYERS[family]
        names |= {f"decoder.layers.{layer}.{n}" for n in _layer(model, family, moe, grouped)}
    for k in range(config.get("num_nextn_predict_layers") or 0):
        names |= {f"mtp.layers.{k}.{n}" for n in _behind(model, family)}
    return names


def _layer(model: str, family: str, moe: bool, grouped: bool) -> Iterator[str]:
    if family in ("deepseek_v3", "kimi_k2"):  # its down-projections share what the norm gives
        yield "input_layernorm.weight"
    yield from (f"self_attention.{name}" for name in ATTENTION[model])
    kinds = ("weight", "bias") if family == "gpt_oss" else ("weight",)
    if not moe:
        yield from ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight")
        yield "mlp.linear_fc2.weight"
        return
    yield "pre_mlp_layernorm.weight"
    yield from (f"mlp.router.{kind}" for kind in kinds)
    for matrix in ("linear_fc1", "linear_fc2"):
        for kind in kinds:
            for e in range(EXPERTS):
                one = f"local_experts.{e}.{matrix}.{kind}"
                yield f"mlp.experts.{matrix}.{kind}{e}" if grouped else f"mlp.experts.{one}"
        if family in SIGMOID:
            yield f"mlp.shared_experts.{matrix}.weight"
    if family in SIGMOID:
        yield "mlp.router.expert_bias"


def _behind(model: str, family: str) -> Iterator[str]:
    """Of a multi-token prediction layer, whose modules are Megatron's own."""
    yield from ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")
    own = {
        name.replace("linear_qkv.layer_norm_", "input_layernorm.")
        for name in _layer(model, family, moe=True, grouped=False)
    }
    for name in own:
        name = name.replace("self_attention.input_layernorm", "input_layernorm")
        for x in ("q", "kv"):
            name = name.replace(f"linear_{x}_up_proj.layer_norm_", f"{x}_layernorm.")
        yield f"mtp_model_layer.{name}"
