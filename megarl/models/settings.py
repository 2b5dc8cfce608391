"""The model that the settings describe: by a folder, by the keys of its config.json, or by both.

A run needs the folder. ``model.config`` then guards against another checkpoint than the one that
the settings (its layout, say) were made for.
"""

from megarl.config.schema import ModelSection
from megarl.errors import ConfigError, Problem
from megarl.models.config_json import ConfigReader
from megarl.models.spec import ModelSpec, read_spec, spec_of


def model_spec(model: ModelSection) -> ModelSpec:
    """What the folder says. Raises DataError for a model that is not supported, ConfigError with
    every dimension in which ``model.config`` disagrees.
    """
    spec = read_spec(model.hf)
    if model.config is None:
        return spec
    meant = described_spec(model)
    problems = [
        Problem(f"model.config and {model.hf}: {p.key}", p.accepted, f"{p.found}, as model.config")
        for p in meant.differences(spec)
    ]
    if problems:
        raise ConfigError(problems)
    return spec


def described_spec(model: ModelSection) -> ModelSpec:
    """What ``model.config`` says, no folder needed. Raises DataError as ``model_spec`` does."""
    assert model.config is not None
    return spec_of(ConfigReader(model.config, "model.config"))
