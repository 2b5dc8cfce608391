"""Qwen3 (dense): grouped-query attention with q/k norms, SwiGLU, rotary embedding, also YaRN's."""

from megarl.models.config_json import ConfigReader
from megarl.models.dense import feed_forward
from megarl.models.mapping import Rule
from megarl.models.rules import (
    DENSE_MLP,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    OUT_PROJ,
    PRE_MLP_NORM,
    QK_NORMS,
    QKV,
)
from megarl.models.spec import ModelSpec

ATTENTION = (INPUT_NORM, QKV, *QK_NORMS, OUT_PROJ, PRE_MLP_NORM)


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return (EMBEDDING, *ATTENTION, *DENSE_MLP, FINAL_NORM, HEAD)


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    config.architecture("Qwen3ForCausalLM")
    return ModelSpec(
        family="qwen3",
        **config.transformer(layers),
        **feed_forward(config, layers),
    )
