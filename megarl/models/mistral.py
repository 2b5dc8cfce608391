"""Mistral (dense): Llama's layers, all within a sliding window where config.json has one."""

from megarl.models.config_json import ConfigReader
from megarl.models.dense import feed_forward
from megarl.models.llama import SCALINGS, rules
from megarl.models.spec import ModelSpec
from megarl.models.windows import FULL, SLIDING, layer_windows

__all__ = ["read", "rules"]


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    config.architecture("MistralForCausalLM")
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    common = config.transformer(
        layers,
        head_dim=hidden // heads,
        scalings=SCALINGS,
        reads=("layer_types",),
    )
    fields = {"qk_norm": False, "windows": _windows(config, layers)}
    return ModelSpec(family="mistral", **{**common, **fields, **feed_forward(config, layers)})


def _windows(config: ConfigReader, layers: int) -> tuple[int, ...]:
    """A layer_types that says otherwise is refused: transformers does not look at it."""
    if "sliding_window" not in config.values:
        accepted = "an integer or null (absent, transformers takes 4096 and others none)"
        config.complain("sliding_window", "absent", accepted)
    window = config.values.get("sliding_window")
    kinds = [FULL if window is None else SLIDING] * layers
    found = config.values.get("layer_types")
    if found not in (None, kinds):
        config.complain("layer_types and sliding_window", [found, window], f"the same: {kinds}")
        return ()
    return layer_windows(config, kinds)
