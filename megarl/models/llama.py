"""Llama 2 and 3 (dense): grouped-query attention without biases, SwiGLU; rotary embedding plain,
Llama 3.1's or YaRN's.
"""

from megarl.models.config_json import ConfigReader
from megarl.models.dense import BEHIND_ATTENTION, feed_forward
from megarl.models.mapping import Rule
from megarl.models.rules import EMBEDDING, INPUT_NORM, OUT_PROJ, QKV
from megarl.models.spec import ModelSpec

SCALINGS = ("llama3", "yarn")


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return (EMBEDDING, INPUT_NORM, QKV, OUT_PROJ, *BEHIND_ATTENTION)


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    config.architecture("LlamaForCausalLM")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    common = config.transformer(layers, head_dim=hidden // heads, kv_heads=heads, scalings=SCALINGS)
    return ModelSpec(family="llama", **{**common, "qk_norm": False, **feed_forward(config, layers)})
