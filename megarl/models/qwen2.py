"""Qwen2 and Qwen2.5 (dense): biases on queries, keys and values; sliding windows in the last
layers, where use_sliding_window is true.
"""

from megarl.models.config_json import ConfigReader
from megarl.models.dense import BEHIND_ATTENTION, feed_forward
from megarl.models.mapping import Rule
from megarl.models.rules import EMBEDDING, INPUT_NORM, OUT_PROJ, QKV, QKV_BIAS
from megarl.models.spec import ModelSpec
from megarl.models.windows import FULL, SLIDING, layer_windows

FULL_LAYERS = 28  # where config.json lacks max_window_layers

READS = ("attention_bias", "qkv_bias", "use_sliding_window", "layer_types")


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return (EMBEDDING, INPUT_NORM, QKV, QKV_BIAS, OUT_PROJ, *BEHIND_ATTENTION)


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    config.architecture("Qwen2ForCausalLM")
    for key in ("attention_bias", "qkv_bias"):  # no keys of the family, which always has them
        config.only(key, True)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    common = config.transformer(layers, head_dim=hidden // heads, reads=READS)
    attention = {"qk_norm": False, "qkv_bias": True, "windows": _windows(config, layers)}
    return ModelSpec(family="qwen2", **{**common, **attention, **feed_forward(config, layers)})


def _windows(config: ConfigReader, layers: int) -> tuple[int, ...]:
    """Of the layers from max_window_layers on; a layer_types that says otherwise is refused."""
    windowed = config.flag("use_sliding_window", default=False)
    full = config.count("max_window_layers", default=FULL_LAYERS, least=0) if windowed else layers
    kinds = [FULL if layer < full else SLIDING for layer in range(layers)]
    found = config.values.get("layer_types")
    if found not in (None, kinds):
        keys = "max_window_layers" if windowed else "use_sliding_window"
        value = full if windowed else False
        config.complain(f"layer_types and {keys}", [found, value], f"the same: {kinds}")
        return ()
    return layer_windows(config, kinds)
