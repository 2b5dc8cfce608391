"""Llama 2 and 3 (dense): grouped-query attention, all of it with biases where attention_bias is
true, SwiGLU; rotary embedding plain, Llama 3.1's or YaRN's.
"""

from megarl.models.config_json import ConfigReader
from megarl.models.dense import BEHIND_ATTENTION, feed_forward
from megarl.models.mapping import Rule
from megarl.models.rules import EMBEDDING, INPUT_NORM, OUT_BIAS, OUT_PROJ, QKV, QKV_BIAS
from megarl.models.spec import ModelSpec

SCALINGS = ("llama3", "yarn")


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    biases = (QKV_BIAS, OUT_BIAS) if spec.out_bias else ()
    return (EMBEDDING, INPUT_NORM, QKV, OUT_PROJ, *biases, *BEHIND_ATTENTION)


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    config.architecture("LlamaForCausalLM")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    common = config.transformer(
        layers,
        head_dim=hidden // heads,
        kv_heads=heads,
        scalings=SCALINGS,
        reads=("attention_bias",),
    )
    bias = config.flag("attention_bias", default=False)
    attention = {"qk_norm": False, "qkv_bias": bias, "out_bias": bias}
    return ModelSpec(family="llama", **{**common, **attention, **feed_forward(config, layers)})
