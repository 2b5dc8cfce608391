"""Sliding windows, as config.json gives them to layers."""

from collections.abc import Sequence

from megarl.models.config_json import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: ConfigReader, kinds: Sequence[str]) -> tuple[int, ...]:
    """``ModelSpec.windows``. ``kinds``: [layers] of those names, where layer_types is absent."""
    found = config.values.get("layer_types")
    if found is None:
        found = list(kinds)
    if not isinstance(found, list) or len(found) != len(kinds) or not set(found) <= {FULL, SLIDING}:
        accepted = f"num_hidden_layers={len(kinds)} of {SLIDING} and {FULL}"
        config.complain("layer_types", found, accepted)
        return ()
    if SLIDING not in found:
        return ()
    window = config.count("sliding_window")
    return tuple(window if kind == SLIDING else 0 for kind in found)
