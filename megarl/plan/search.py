"""Layouts of a model on so many GPUs that fit, the quickest first, by a simple estimate.

    seconds = (1 + bubble) FLOPs / COMPUTE + sum over axes of bytes / (NVLINK or NETWORK)

FLOPs are 6 a parameter that a token is multiplied with (8 where recomputation repeats the forward
pass), of a rank's share of its rows; bytes are those of ``traffic.py``, none of them hidden behind
computation. The rates are an H100's with one 400 Gbit/s port: rounded, the same for every layout,
and good for comparing layouts only. What they do not know: small matrices are slower, and vpp needs
more messages.

Tried are: tp of 1, 2, 4, 8; cp of 1 to 8; every pp that the GPUs allow, with fewer layers in the
last and first stage where the layers do not divide; vpp of 1, 2, 4; ep of powers of two and the
number of experts; etp of 1 and tp; and the ways of recomputation that are not fixed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.config.layout import layout_problems
from megarl.config.schema import ParallelSection
from megarl.mesh import Mesh
from megarl.models.spec import ModelSpec
from megarl.plan.choices import Choices, Rows
from megarl.plan.job import Job, mesh_with
from megarl.plan.memory import stage_memory
from megarl.plan.parameters import active_parameters
from megarl.plan.traffic import bubble, step_traffic

COMPUTE = 400e12  # FLOP/s of a rank
NVLINK = 200e9  # bytes/s of a rank inside a node
NETWORK = 40e9  # and between nodes

_SPLITS = (1, 2, 4, 8)
_CHUNKS = (1, 2, 4)
_MOST_STAGES = 64


@dataclass(frozen=True)
class Suggestion:
    mesh: Mesh
    choices: Choices
    num_rows: int
    heaviest: float  # bytes of the heaviest rank
    bubble: float
    seconds: float  # of an optimizer step, to compare with another layout's


def suggest(job: Job, choices: Sequence[Choices], limit: int = 5) -> list[Suggestion]:
    """The quickest of those that fit. ``choices``: the ways that may be taken, from the one that
    computes least and holds most to the opposite; of one layout the first that fits is taken, and
    of layouts that differ in their experts and chunks alone the quickest.
    """
    found: list[Suggestion] = []
    for mesh in _layouts(job):
        rows = job.rows(mesh)
        if _heaviest(job, mesh, choices[-1], rows) > job.gpu_bytes:
            continue
        most, choice = next(
            (most, c) for c in choices if (most := _heaviest(job, mesh, c, rows)) <= job.gpu_bytes
        )
        seconds = estimated_seconds(job, mesh, choice)
        found.append(Suggestion(mesh, choice, rows.count, most, bubble(mesh, rows.count), seconds))
    found.sort(key=lambda suggestion: suggestion.seconds)
    different: dict[tuple[int, ...], Suggestion] = {}
    for suggestion in found:
        mesh = suggestion.mesh
        different.setdefault((mesh.tp, mesh.pp, mesh.cp, mesh.dp), suggestion)
    return list(different.values())[:limit]


def estimated_seconds(job: Job, mesh: Mesh, choices: Choices) -> float:
    """Of the module's docstring."""
    rows = job.rows(mesh)
    tokens = rows.count * rows.tokens / (mesh.tp * mesh.cp * mesh.pp)
    computing = (1 + bubble(mesh, rows.count)) * _flops(job.spec, choices) * tokens / COMPUTE
    moved = step_traffic(job.spec, mesh, choices, rows)
    return computing + sum(x.num_bytes / (NVLINK if x.in_node else NETWORK) for x in moved)


def _flops(spec: ModelSpec, choices: Choices) -> int:
    """Of a token, forward and backward."""
    dense = spec.layers - spec.num_moe_layers
    experts = spec.num_moe_layers * 3 * spec.hidden * (spec.topk * spec.moe_ffn + spec.shared_ffn)
    mlp = dense * 3 * spec.hidden * spec.ffn
    multiplied = active_parameters(spec) - spec.vocab * spec.hidden
    rest = multiplied - experts - mlp
    repeated = experts * choices.repeats_experts + mlp * choices.repeats_mlp
    return 6 * multiplied + 2 * (repeated + rest * choices.repeats_attention)


def _heaviest(job: Job, mesh: Mesh, choices: Choices, rows: Rows) -> float:
    """Stages in between differ from the second only by holding fewer rows, or dense layers. Stops
    at the first that does not fit.
    """
    most = 0.0
    for stage in sorted({0, min(1, mesh.pp - 1), mesh.pp - 1}):
        critic = job.config.critic.lr is not None
        found = stage_memory(job.spec, mesh, stage, choices, rows, critic=critic)
        most = max(most, found.total)
        if most > job.gpu_bytes:
            break
    return most


def _layouts(job: Job) -> Iterator[Mesh]:
    """Every layout of the docstring that breaks no rule and gives every rank a sample."""
    for section in _sections(job.spec, job.gpus):
        if job.samples < section.dp:
            continue
        config = job.config.model_copy(update={"parallel": section})
        if next(layout_problems(config, job.gpus, job.hf), None) is None:
            yield mesh_with(config, section.dp)


def _sections(spec: ModelSpec, gpus: int) -> Iterator[ParallelSection]:
    for tp in (n for n in _SPLITS if spec.heads % n == 0 and spec.kv_heads % n == 0):
        for cp in (n for n in _SPLITS if gpus % (tp * n) == 0):
            left = gpus // (tp * cp)
            for pp in (n for n in range(1, _MOST_STAGES + 1) if left % n == 0):
                yield from _in_stages(spec, tp, cp, pp, left // pp)


def _in_stages(spec: ModelSpec, tp: int, cp: int, pp: int, dp: int) -> Iterator[ParallelSection]:
    ends = _ends(spec.layers, pp)
    if ends is None:
        return
    first, last = ends
    for vpp in _CHUNKS if pp > 1 else (1,):
        for ep, etp in _expert_grids(spec, tp, tp * cp * dp):
            yield ParallelSection.model_construct(
                tp=tp,
                cp=cp,
                pp=pp,
                dp=dp,
                ep=ep,
                etp=etp if spec.experts else None,
                vpp=vpp,
                first_layers=first,
                last_layers=last,
            )


def _expert_grids(spec: ModelSpec, tp: int, stage_size: int) -> list[tuple[int, int]]:
    if not spec.experts:
        return [(1, tp)]
    sizes = {n for n in (*(2**k for k in range(11)), spec.experts) if spec.experts % n == 0}
    return [(ep, etp) for ep in sorted(sizes) for etp in {1, tp} if stage_size % (ep * etp) == 0]


def _ends(layers: int, pp: int) -> tuple[int | None, int | None] | None:
    """Layers of the first and the last stage, None where as many as the others'. None: there are
    not so many stages.
    """
    if pp > layers:
        return None
    if layers % pp == 0:
        return None, None
    size = -(-layers // pp)
    missing = size * pp - layers
    last = max(1, size - missing)
    first = size - (missing - (size - last))
    if first < 1:
        return None
    return (first if first != size else None), last
