"""Rules that more than one family has."""

from dataclasses import replace

from megarl.models.mapping import Rule

_LAYER = "decoder.layers.{L}."
_HF = "model.layers.{L}."

EMBEDDING = Rule(
    "model",
    ("embedding.word_embeddings.weight",),
    (("model.embed_tokens.weight", ("vocab", "hidden")),),
    "vocab",
)
INPUT_NORM = Rule(
    "layer",
    (
        _LAYER + "input_layernorm.weight",
        _LAYER + "self_attention.linear_qkv.layer_norm_weight",
    ),
    ((_HF + "input_layernorm.weight", ("hidden",)),),
    "replicated",
)
QKV = Rule(
    "layer",
    (_LAYER + "self_attention.linear_qkv.weight",),
    (
        (_HF + "self_attn.q_proj.weight", ("q", "hidden")),
        (_HF + "self_attn.k_proj.weight", ("kv", "hidden")),
        (_HF + "self_attn.v_proj.weight", ("kv", "hidden")),
    ),
    "qkv",
)
QKV_BIAS = Rule(
    "layer",
    (_LAYER + "self_attention.linear_qkv.bias",),
    (
        (_HF + "self_attn.q_proj.bias", ("q",)),
        (_HF + "self_attn.k_proj.bias", ("kv",)),
        (_HF + "self_attn.v_proj.bias", ("kv",)),
    ),
    "qkv",
)
QK_NORMS = tuple(
    Rule(
        "layer",
        (_LAYER + f"self_attention.{x}_layernorm.weight",),
        ((_HF + f"self_attn.{x}_norm.weight", ("head_dim",)),),
        "replicated",
    )
    for x in ("q", "k")
)
OUT_PROJ = Rule(
    "layer",
    (_LAYER + "self_attention.linear_proj.weight",),
    ((_HF + "self_attn.o_proj.weight", ("hidden", "q")),),
    "row",
)
OUT_BIAS = Rule(
    "layer",
    (_LAYER + "self_attention.linear_proj.bias",),
    ((_HF + "self_attn.o_proj.bias", ("hidden",)),),
    "replicated",
)
PRE_MLP_NORM = Rule(
    "layer",
    (
        _LAYER + "pre_mlp_layernorm.weight",
        _LAYER + "mlp.linear_fc1.layer_norm_weight",
    ),
    ((_HF + "post_attention_layernorm.weight", ("hidden",)),),
    "replicated",
)
DENSE_MLP = (
    Rule(
        "dense",
        (_LAYER + "mlp.linear_fc1.weight",),
        (
            (_HF + "mlp.gate_proj.weight", ("ffn", "hidden")),
            (_HF + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        "gate_up",
    ),
    Rule(
        "dense",
        (_LAYER + "mlp.linear_fc2.weight",),
        ((_HF + "mlp.down_proj.weight", ("hidden", "ffn")),),
        "row",
    ),
)
ROUTER = Rule(
    "moe",
    (_LAYER + "mlp.router.weight",),
    ((_HF + "mlp.gate.weight", ("experts", "hidden")),),
    "replicated",
)
EXPERT_BIAS = Rule(
    "moe",
    (_LAYER + "mlp.router.expert_bias",),
    ((_HF + "mlp.gate.e_score_correction_bias", ("experts",)),),
    "replicated",
    dtype="float32",
)
EXPERTS = (
    Rule(
        "expert",
        (
            _LAYER + "mlp.experts.local_experts.{E}.linear_fc1.weight",
            _LAYER + "mlp.experts.linear_fc1.weight{E}",
        ),
        (
            (_HF + "mlp.experts.{E}.gate_proj.weight", ("moe_ffn", "hidden")),
            (_HF + "mlp.experts.{E}.up_proj.weight", ("moe_ffn", "hidden")),
        ),
        "gate_up",
    ),
    Rule(
        "expert",
        (
            _LAYER + "mlp.experts.local_experts.{E}.linear_fc2.weight",
            _LAYER + "mlp.experts.linear_fc2.weight{E}",
        ),
        ((_HF + "mlp.experts.{E}.down_proj.weight", ("hidden", "moe_ffn")),),
        "row",
    ),
)
SHARED_EXPERTS = (
    Rule(
        "moe",
        (_LAYER + "mlp.shared_experts.linear_fc1.weight",),
        (
            (_HF + "mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden")),
            (_HF + "mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden")),
        ),
        "gate_up",
    ),
    Rule(
        "moe",
        (_LAYER + "mlp.shared_experts.linear_fc2.weight",),
        ((_HF + "mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn")),),
        "row",
    ),
)
FINAL_NORM = Rule(
    "model",
    ("decoder.final_layernorm.weight",),
    (("model.norm.weight", ("hidden",)),),
    "replicated",
)
HEAD = Rule(
    "model",
    ("output_layer.weight",),
    (("lm_head.weight", ("vocab", "hidden")),),
    "vocab",
    tied_to="model.embed_tokens.weight",
)

# Multi-token prediction: what its layers have beside a transformer layer
EMBEDDING_WITH_COPIES = replace(EMBEDDING, copies=_HF + "embed_tokens.weight")
HEAD_WITH_COPIES = replace(HEAD, copies=_HF + "shared_head.head.weight")
MTP = (
    *(
        Rule(
            "mtp",
            (f"mtp.layers.{{K}}.{megatron}.weight",),
            ((_HF + f"{hf}.weight", ("hidden",)),),
            "replicated",
        )
        for megatron, hf in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("final_layernorm", "shared_head.norm"),
        )
    ),
    Rule(
        "mtp",
        ("mtp.layers.{K}.eh_proj.weight",),
        ((_HF + "eh_proj.weight", ("hidden", "hidden_twice")),),
        "column",
    ),
)
