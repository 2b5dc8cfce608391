"""Whether a checkpoint's weights are of the model that a run or a config.json means.

Shapes do not tell: another rotary base, norm epsilon or number of experts a token loads without a
word and computes something else. A checkpoint therefore says what its weights are of:
``model.json`` the policy's, ``critic.json`` the critic's, if there is one.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from megarl.checkpoint.manager import read_json
from megarl.errors import DataError
from megarl.models.spec import ModelSpec

# What a model that only lends its body to a value head may have otherwise.
NOT_OF_THE_BODY = ("tie_embeddings", "mtp_layers")


def stored_spec(path: Path) -> ModelSpec:
    """Raises DataError naming the file when it is missing or describes no model."""
    value = read_json(path)
    try:
        return ModelSpec.from_json(value)
    except (DataError, TypeError) as e:
        raise DataError(f"{path}: {e}") from e


def config_contradictions(
    path: Path, spec: ModelSpec, hf_dir: Path, but: Collection[str] = ()
) -> list[str]:
    """Every dimension in which the model stored in ``path`` is not ``spec``, which was read from
    ``hf_dir``, with both values; ``but`` some.
    """
    return [
        f"{p.key}: {p.found} in {path}, {p.accepted} in {hf_dir / 'config.json'}"
        for p in stored_spec(path).differences(spec)
        if p.key not in but
    ]


def require_no_contradictions(found: Sequence[str]) -> None:
    """Raises DataError with each of them, once."""
    once = list(dict.fromkeys(found))
    if once:
        count = "1 contradiction" if len(once) == 1 else f"{len(once)} contradictions"
        title = f"a checkpoint and config.json describe different models ({count}):"
        raise DataError("\n  ".join([title, *once]))
