"""The form in which servers hold a model's weights, and the trainer's tensors put into it.

1. A server holds what the folder is that it was started from: bf16, fp32, or FP8 in blocks. A
   weight that is in codes there is sent as codes and scales, ``X`` and ``X_scale_inv``, by the
   function that writes such folders (``fp8_export.py``): what is sent and what tools/
   quantize_hf_fp8.py makes of the same tensors are the same bits.
2. Codes are made of what the trainer has, not of what it would be in the form's dtype, and where
   the tensor lies. All else is cast to that dtype, except what every server keeps in fp32.
3. A group has to reach a server in one call: codes with their scales, since loaders compute from
   both (SGLang 0.5.23: ``kv_b_proj``, in ``post_load_weights``), and what a family's table calls
   ``together``.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megarl.config.schema import Config
from megarl.config.served import served_dtype, served_scales
from megarl.errors import ConfigError, DataError, Problem, SyncError
from megarl.models.config_json import read_object
from megarl.models.fp8_export import Fp8Export, stored_export
from megarl.models.hf_fp8 import Fp8Blocks
from megarl.models.hf_io import open_checkpoint
from megarl.models.mapping import ModelMapping, mapping_for
from megarl.models.spec import ModelSpec, read_spec
from megarl.types import TensorSpec

Group = list[tuple[str, Tensor]]
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class ServedForm:
    """``specs``: of everything that servers are sent, in the order of the layers. ``fp8``: what of
    it is in codes; None: nothing. ``together``: by name, all of a group's weights, where these are
    several.
    """

    specs: tuple[TensorSpec, ...]
    fp8: Fp8Export | None
    together: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(mapping: ModelMapping, dtype: str, fp8: Fp8Export | None = None) -> "ServedForm":
        """``dtype``: float32 or bfloat16, of what is not in codes."""
        plain = {spec.name: spec for spec in mapping.hf_spec(dtype)}
        specs = tuple(plain.values())
        if fp8 is not None:
            specs = tuple(s if s.name in fp8.codes else plain.get(s.name, s) for s in fp8.specs)
        together = {name: names for names in mapping.together() for name in names}
        return ServedForm(specs, fp8, together)

    def groups(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Group]:
        """(HF name, whole tensor) -> what servers are sent, in groups; each comes with the last of
        its weights, and until then its others are kept.

        Raises SyncError for a tensor that the model has not, and where a group is not whole at the
        end; DataError, with its name, for a weight that has no codes.
        """
        waiting: dict[tuple[str, ...], dict[str, Group]] = {}
        for name, tensor in tensors:
            names = self.together.get(name)
            if names is None:
                yield self._parts(name, tensor)
                continue
            there = waiting.setdefault(names, {})
            there[name] = self._parts(name, tensor)
            if len(there) == len(names):
                del waiting[names]
                yield [part for name in names for part in there[name]]
        for names, there in waiting.items():
            missing = ", ".join(name for name in names if name not in there)
            raise SyncError(f"weights: {', '.join(there)} came without {missing}")

    def _parts(self, name: str, tensor: Tensor) -> Group:
        if self.fp8 is not None and name in self.fp8.codes:
            found = self.fp8.parts(name, tensor)
            return [(part, values) for part, values in found if isinstance(values, Tensor)]
        if name not in self._dtypes:
            raise SyncError(f"weights: {name} is not a weight of this model")
        return [(name, tensor.to(self._dtypes[name]))]

    @cached_property
    def _dtypes(self) -> dict[str, torch.dtype]:
        return {spec.name: getattr(torch, spec.dtype) for spec in self.specs}


def served_form(config: Config, spec: ModelSpec) -> ServedForm:
    """That of a run's servers, ``spec`` of whose model is that of ``model.hf``.

    Raises ConfigError with everything in which ``rollout.model`` is another model than
    ``model.hf``, DataError for one that servers cannot hold as it says, or whose tensors say
    something else than its config.json.
    """
    folder, mapping = config.server_hf, mapping_for(spec)
    if config.rollout.model is not None:
        _require_same_model(config, spec, read_spec(folder))
    values, dtype = read_object(folder / "config.json"), _DTYPES[served_dtype(config)]
    scales = served_scales(config, values)
    blocks = None if scales is None else Fp8Blocks.of(values)
    if scales is None or blocks is None:
        return ServedForm.of(mapping, dtype)
    try:
        fp8 = stored_export(mapping, blocks, scales)
        _require_same_codes(folder, fp8)
    except DataError as e:
        raise DataError(f"{folder}: {e}") from e
    return ServedForm.of(mapping, dtype, fp8)


def _require_same_model(config: Config, spec: ModelSpec, served: ModelSpec) -> None:
    because = f"as {config.model.hf}: servers hold the same model, if in another precision"
    problems = [
        Problem(f"rollout.model: {p.key}", p.accepted, f"{p.found}, {because}")
        for p in spec.differences(served)
    ]
    if set(served.eos_ids) != set(spec.eos_ids):  # responses would end elsewhere
        found, accepted = (list(s.eos_ids) for s in (served, spec))
        key = "rollout.model: eos_token_id"
        problems.append(Problem(key, str(found), f"{accepted}, {because}"))
    if problems:
        raise ConfigError(problems)


def _require_same_codes(folder: Path, fp8: Fp8Export) -> None:
    """A server expects what its files hold; they may be elsewhere."""
    if not any(folder.glob("*.safetensors")):
        return
    checkpoint = open_checkpoint(folder)
    wrong = [n for n in checkpoint.names() if (n in checkpoint.codes) != (n in fp8.codes)]
    if wrong:
        kinds = {
            "not listed in config.json, but plain": [n for n in wrong if n in fp8.codes],
            "in FP8, which no server takes so": [n for n in wrong if n in checkpoint.codes],
        }
        said = [f"{len(names)} {kind}: {names[0]}" for kind, names in kinds.items() if names]
        raise DataError("; ".join(said))
