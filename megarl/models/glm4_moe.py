"""GLM-4.5 (``glm4_moe``): grouped-query attention with biases and half of a head turned, optional
q/k norms, and the feed-forward part of ``sigmoid_moe.py``.
"""

from megarl.models.config_json import ConfigReader
from megarl.models.mapping import Rule
from megarl.models.rules import (
    EMBEDDING_WITH_COPIES,
    INPUT_NORM,
    OUT_PROJ,
    QK_NORMS,
    QKV,
    QKV_BIAS,
)
from megarl.models.sigmoid_moe import BEHIND_ATTENTION, READS, feed_forward
from megarl.models.spec import ModelSpec


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return (
        EMBEDDING_WITH_COPIES,
        INPUT_NORM,
        QKV,
        *([QKV_BIAS] if spec.qkv_bias else []),
        *(QK_NORMS if spec.qk_norm else []),
        OUT_PROJ,
        *BEHIND_ATTENTION,
    )


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    config.architecture("Glm4MoeForCausalLM")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    common = config.transformer(
        layers,
        head_dim=hidden // heads,
        rope_share=0.5,
        reads=(*READS, "attention_bias", "use_qk_norm"),
    )
    attention = {
        "qkv_bias": config.flag("attention_bias", default=False),
        "qk_norm": config.flag("use_qk_norm", default=False),
    }
    return ModelSpec(family="glm4_moe", **{**common, **attention, **feed_forward(config, layers)})
