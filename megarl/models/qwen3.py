"""Qwen3 (dense): grouped-query attention with q/k norms, SwiGLU, plain rotary embedding."""

from megarl.models.config_json import ConfigReader
from megarl.models.mapping import Rule
from megarl.models.spec import ModelSpec

EMBEDDING = Rule(
    "model",
    ("embedding.word_embeddings.weight",),
    (("model.embed_tokens.weight", ("vocab", "hidden")),),
    "vocab",
)
ATTENTION = (
    Rule(
        "layer",
        (
            "decoder.layers.{L}.input_layernorm.weight",
            "decoder.layers.{L}.self_attention.linear_qkv.layer_norm_weight",
        ),
        (("model.layers.{L}.input_layernorm.weight", ("hidden",)),),
        "replicated",
    ),
    Rule(
        "layer",
        ("decoder.layers.{L}.self_attention.linear_qkv.weight",),
        (
            ("model.layers.{L}.self_attn.q_proj.weight", ("q", "hidden")),
            ("model.layers.{L}.self_attn.k_proj.weight", ("kv", "hidden")),
            ("model.layers.{L}.self_attn.v_proj.weight", ("kv", "hidden")),
        ),
        "qkv",
    ),
    Rule(
        "layer",
        ("decoder.layers.{L}.self_attention.q_layernorm.weight",),
        (("model.layers.{L}.self_attn.q_norm.weight", ("head_dim",)),),
        "replicated",
    ),
    Rule(
        "layer",
        ("decoder.layers.{L}.self_attention.k_layernorm.weight",),
        (("model.layers.{L}.self_attn.k_norm.weight", ("head_dim",)),),
        "replicated",
    ),
    Rule(
        "layer",
        ("decoder.layers.{L}.self_attention.linear_proj.weight",),
        (("model.layers.{L}.self_attn.o_proj.weight", ("hidden", "q")),),
        "row",
    ),
    Rule(
        "layer",
        (
            "decoder.layers.{L}.pre_mlp_layernorm.weight",
            "decoder.layers.{L}.mlp.linear_fc1.layer_norm_weight",
        ),
        (("model.layers.{L}.post_attention_layernorm.weight", ("hidden",)),),
        "replicated",
    ),
)
DENSE_MLP = (
    Rule(
        "dense",
        ("decoder.layers.{L}.mlp.linear_fc1.weight",),
        (
            ("model.layers.{L}.mlp.gate_proj.weight", ("ffn", "hidden")),
            ("model.layers.{L}.mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        "gate_up",
    ),
    Rule(
        "dense",
        ("decoder.layers.{L}.mlp.linear_fc2.weight",),
        (("model.layers.{L}.mlp.down_proj.weight", ("hidden", "ffn")),),
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

RULES = (EMBEDDING, *ATTENTION, *DENSE_MLP, FINAL_NORM, HEAD)


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    config.architecture("Qwen3ForCausalLM")
    return ModelSpec(
        family="qwen3",
        ffn=config.count("intermediate_size"),
        moe_ffn=0,
        experts=0,
        topk=0,
        norm_topk_prob=False,
        moe_layers=(False,) * layers,
        **config.transformer(layers),
    )
