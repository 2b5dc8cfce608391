"""Which parameters ``train.frozen`` names, in any layout: names are those of the whole model."""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megarl.errors import ConfigError, Problem
from megarl.models.mapping import ModelMapping, mapping_for
from megarl.models.spec import ModelSpec

_EXPERT = re.compile(r"(?<=local_experts\.)\d+|(?<=\.weight)\d+$")
_BIAS, _ROUTER = "router.expert_bias", "router.weight"


@dataclass(frozen=True)
class Frozen:
    """Parameters that are not trained."""

    patterns: tuple[str, ...]
    mapping: ModelMapping

    def is_frozen(self, name: str) -> bool:
        """Of a parameter under its global Megatron name, or of a router's expert bias, which stays
        where it is if the router does.
        """
        if not self.patterns:
            return False
        if any(map(self._matches, (name, *self.mapping.hf_names(name)))):
            return True
        return name.endswith(_BIAS) and self.is_frozen(name.removesuffix(_BIAS) + _ROUTER)

    def _matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


def frozen_parameters(patterns: Sequence[str], spec: ModelSpec) -> Frozen:
    """Raises ConfigError for a pattern that matches nothing, for a tensor or a layer's experts of
    which only a part is matched, and where nothing is left to train.
    """
    frozen = Frozen(tuple(patterns), mapping_for(spec))
    if patterns and (problems := list(_problems(frozen))):
        raise ConfigError(problems)
    return frozen


def _problems(frozen: Frozen) -> Iterator[Problem]:
    parameters = frozen.mapping.megatron_names(every_spelling=True)
    tensors = {name: frozen.mapping.hf_names(name) for name in parameters}
    names = list(dict.fromkeys([*parameters, *(hf for hfs in tensors.values() for hf in hfs)]))
    for i, pattern in enumerate(frozen.patterns):
        if not any(fnmatchcase(name, pattern) for name in names):
            close = ", ".join(_close(pattern, names))
            accepted = f"a pattern that matches a parameter, e.g. {close}"
            yield Problem(f"train.frozen[{i}]", pattern, accepted)
    for name, hfs in tensors.items():
        matched = [hf for hf in hfs if frozen._matches(hf)]
        if matched and len(matched) < len(hfs) and not frozen._matches(name):
            rest = ", ".join(hf for hf in hfs if hf not in matched)
            accepted = f"{rest} as well: Megatron holds them as one tensor, {name}"
            yield Problem("train.frozen", ", ".join(matched), accepted)
            return  # of many layers one is enough
    experts: dict[str, set[bool]] = {}
    for name in filter(frozen.mapping.is_expert, parameters):
        experts.setdefault(_EXPERT.sub("*", name), set()).add(frozen.is_frozen(name))
    for name, states in experts.items():
        if len(states) > 1:
            accepted = "all experts of a layer or none: checkpoints hold their state as one tensor"
            yield Problem("train.frozen", f"some of {name}", accepted)
            return
    if all(map(frozen.is_frozen, parameters)):
        yield Problem("train.frozen", f"{list(frozen.patterns)}", "patterns that leave something")


def _close(pattern: str, names: Sequence[str]) -> list[str]:
    """Names like ``pattern``, with layers and experts left open."""
    kinds = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))
    return difflib.get_close_matches(pattern, kinds, n=3, cutoff=0.0)
