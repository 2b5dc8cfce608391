"""Names that a model was given and did not take, and rightly so: two kinds, each seen, not guessed.

1. A tied weight: the model has it and another one as the same parameter, the other's name was
   taken, and the bytes that came for both are the same ones. So it holds these bytes.
2. A layer for multi-token prediction, one of the `num_nextn_predict_layers` of the model's own
   configuration behind its last: a model takes none of them; a draft model does, if the server has
   one. With a draft model such a name counts as taken if that one took it, or has it tied to the
   model's own (it shares embedding and head) and the same bytes came for these.

What other tensor-parallel ranks take is not known here; whoever asks all ranks, compares them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .records import Record

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SHARED = {  # of a layer for multi-token prediction: which of the model's own it is
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def dropped(model: torch.nn.Module, record: Record, drafts: Iterable[Record] | None) -> list[str]:
    """Names that came and were not taken, without an excuse. `drafts`: the records of the server's
    draft models; None: it has none.
    """
    digests = record.digests or {}
    missing = digests.keys() - record.taken
    if not missing:
        return []
    missing -= _tied(model, record.taken, digests, missing)
    config: Any = getattr(model, "config", None)
    return sorted(name for name in missing if not _of_draft(name, config, digests, drafts))


def _tied(
    model: torch.nn.Module, taken: set[str], digests: Mapping[str, str], missing: Iterable[str]
) -> set[str]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    excused = set()
    for name in missing:
        own = parameters.get(name)
        twins = (other for other, p in parameters.items() if p is own and other in taken)
        if own is not None and any(digests.get(twin) == digests[name] for twin in twins):
            excused.add(name)
    return excused


def _of_draft(
    name: str, config: Any, digests: Mapping[str, str], drafts: Iterable[Record] | None
) -> bool:
    layers = getattr(config, "num_hidden_layers", None)
    more = getattr(config, "num_nextn_predict_layers", None) or 0
    match = _LAYER.match(name)
    if match is None or layers is None or not layers <= int(match[1]) < layers + more:
        return False
    if drafts is None or any(name in draft.taken for draft in drafts):
        return True
    shared = _SHARED.get(match[2], "")
    return digests[name] == digests.get(shared)
