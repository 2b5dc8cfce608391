"""What of a model a push sends, parameter by parameter, from which ranks and in which buckets:
exact, by the names and shapes that the mapping has. For ``scale_pushes.py``.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from megarl.mesh import Mesh
from megarl.models.fp8_export import fp8_export
from megarl.models.mapping import ModelMapping, mapping_for
from megarl.models.spec import ModelSpec
from megarl.plan.job import read_job
from megarl.types import TensorSpec

ROOT = Path(__file__).parents[1]

FORMS = ("bf16", "fp8")
_NUMBER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
_DIGEST = "0" * 16

# --- layouts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Of the GPUs that train, by their number; ``server``: GPUs of one server, by form."""

    meshes: Mapping[int, Mesh]
    server: Mapping[str, int]


# Where weights and gradients (6 bytes a parameter) take at most 50 GB of a GPU, the optimizer's
# state being in host memory; the largest are those of configs/models/, shrunk by cp and dp.
LAYOUTS: Mapping[str, Layout] = {
    "qwen3-30b-a3b": Layout(
        {4: Mesh(tp=4, ep=4)} | {8 << k: Mesh(tp=4, dp=2 << k, ep=8) for k in range(6)},
        {"bf16": 4, "fp8": 4},
    ),
    "qwen3-235b-a22b": Layout(
        {
            32: Mesh(tp=4, pp=4, dp=2, ep=8, first_layers=23, last_layers=23),
            64: Mesh(tp=4, pp=8, dp=2, ep=8, last_layers=3),
            128: Mesh(tp=4, pp=16, dp=2, ep=8, last_layers=4),
            256: Mesh(tp=4, pp=16, dp=4, ep=8, last_layers=4),
        },
        {"bf16": 8, "fp8": 4},
    ),
    "deepseek-v3": Layout(
        {
            128: Mesh(tp=8, pp=16, dp=1, ep=8, last_layers=1),
            256: Mesh(tp=8, pp=16, dp=2, ep=16, last_layers=1),
        },
        {"bf16": 32, "fp8": 16},
    ),
}


@cache
def spec_of(name: str) -> ModelSpec:
    """By config.json's values in configs/models/."""
    files = [str(ROOT / "configs" / "models" / f"{name}.yaml")]
    return read_job(files, gpus=1024, gpu_gib=1e5, sample_tokens=None).spec


# --- weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """A Megatron parameter. ``part``: decoder, mtp, or ends; ``number``: of its layer there, of the
    ends 0 (first stage) or -1. ``expert``: its number. ``source``: bytes in the trainer's bf16, of
    which ``quantised`` become codes. ``groups``: (bytes, tensors) of what a server must get
    together, which is a matrix with its scales. ``told``: bytes of JSON of its tensors' digests.
    """

    part: str
    number: int
    expert: int | None
    source: int
    quantised: int
    groups: tuple[tuple[int, int], ...]
    num_bytes: int  # of all groups, and tensors in them
    tensors: int
    told: int


@dataclass(frozen=True)
class Bucket:
    num_bytes: int
    tensors: int


@cache
def weights_of(name: str, form: str) -> list[Weight]:
    """Of the whole model, multi-token prediction included, in the order in which they are sent."""
    mapping = _mapping_of(name)
    plain = {spec.name: spec for spec in mapping.hf_spec()}
    served = plain if form == "bf16" else {s.name: s for s in fp8_export(mapping, "f32").specs}
    return [_weight(mapping, name, plain, served) for name in mapping.megatron_names()]


@cache
def _mapping_of(name: str) -> ModelMapping:
    return mapping_for(spec_of(name))


def _weight(
    mapping: ModelMapping,
    name: str,
    plain: Mapping[str, TensorSpec],
    served: Mapping[str, TensorSpec],
) -> Weight:
    layer, expert = _NUMBER.match(name), _EXPERT.search(name)
    assert mapping.is_expert(name) == (expert is not None), name
    groups, source, quantised, told = [], 0, 0, 0
    for hf, _ in mapping.exported(name):
        group = [served[n] for n in (hf, f"{hf}_scale_inv") if n in served]
        groups.append((sum(map(num_bytes, group)), len(group)))
        source += num_bytes(plain[hf])
        quantised += num_bytes(plain[hf]) if len(group) > 1 else 0
        told += sum(len(f'"{spec.name}": "{_DIGEST}", ') for spec in group)
    return Weight(
        part=layer[1] if layer else "ends",
        number=int(layer[2]) if layer else 0 if name.startswith("embedding.") else -1,
        expert=int(expert[1]) if expert else None,
        source=source,
        quantised=quantised,
        groups=tuple(groups),
        num_bytes=sum(size for size, _ in groups),
        tensors=sum(count for _, count in groups),
        told=told,
    )


def num_bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def by_sender(
    weights: Sequence[Weight], layers: int, mesh: Mesh, senders: int
) -> list[list[list[Weight]]]:
    """What each sender of each stage sends: layers in turn, what is in none is the last one's. But
    the senders of a layer's expert group share its experts.
    """
    stages = [mesh.layers_of(layers, stage) for stage in range(mesh.pp)]
    stage_of = {layer: stage for stage, held in enumerate(stages) for layer in held}
    found: list[list[list[Weight]]] = [[[] for _ in range(senders)] for _ in stages]
    experts = 1 + max((w.expert for w in weights if w.expert is not None), default=0)
    at = mesh.senders(0, senders)
    for weight in weights:
        of_stage = mesh.pp - 1
        if weight.part == "decoder":
            of_stage = stage_of[weight.number]
        elif weight.part == "ends" and weight.number == 0:
            of_stage = 0
        turn = -1 if weight.part == "ends" else weight.number
        sender = turn % senders
        if weight.expert is not None:
            group, size = at[sender] // (mesh.etp * mesh.ep), mesh.etp * mesh.ep
            of_group = [rank - group * size for rank in at if rank // size == group]
            ep = weight.expert * mesh.ep // experts
            rank = mesh.expert_senders(of_group, turn)[ep * mesh.etp] + group * size
            sender = at.index(rank)
        found[of_stage][sender].append(weight)
    return found


def buckets(groups: Iterable[tuple[int, int]], max_bytes: int) -> list[Bucket]:
    """As ``Packer`` fills them: in order, no group split, one that is too large alone."""
    found, size, count = [], 0, 0
    for group, tensors in groups:
        if group > max_bytes:
            found.append(Bucket(group, tensors))
            continue
        if count and size + group > max_bytes:
            found.append(Bucket(size, count))
            size, count = 0, 0
        size, count = size + group, count + tensors
    return [*found, Bucket(size, count)] if count else found


def total(weights: Sequence[Weight]) -> int:
    return sum(weight.num_bytes for weight in weights)
