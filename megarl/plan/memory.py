"""Memory of a rank of every pipeline stage, when it is greatest.

All ranks of a stage hold the same number of everything, so one stands for the stage::

    parameters   2 (bf16) or 4 (fp32) a number, trained or not; 4 a number of the expert bias;
                 with FP8 2 more of a layer's matrices, a copy by rows and one by columns, or these
                 alone where parameters are stored so
    gradients    4 n_trained                                 whole on every rank: they add up
    optimizer    12 (bf16: main, two moments; fp32: 8) n_shared / (dp cp) + n_expert / edp
    activations  of the rows that a stage has begun and not finished, and of what is recomputed
    head         the last stage: logits of one row
    working      the gradient of the largest matrix before it is added, a gathered activation and
                 its gradient
    allowance    CUDA context, NCCL, workspaces, fragmentation: ALLOWANCE bytes, by experience

where edp = tp cp dp / (ep etp). Megatron aligns each parameter in its buffers to 64 numbers and
rounds a buffer up to a multiple of lcm(ranks, 128); that padding, under ``padding_bound``, is left
out.

Rows in flight
--------------
Of m rows, stage r of pp begins min(m, pp - r) before it finishes the first (1F1B). Interleaved, it
begins min(m vpp, 2 (pp - r - 1) + (vpp - 1) pp + 1) passes of one row through one chunk, chunk 0
for pp rows, then chunk 1 for as many, and so on.
"""

from collections import Counter
from dataclasses import dataclass, replace

from megarl.mesh import Mesh
from megarl.models.mapping import VOCAB_MULTIPLE, padded_vocab_size
from megarl.models.spec import ModelSpec
from megarl.plan.activations import LayerBytes, first_bytes, head_bytes, layer_bytes
from megarl.plan.choices import Choices, Rows
from megarl.plan.parameters import Count, quantised_count, stage_count

GIB = 2**30
ALLOWANCE = 6 * GIB


@dataclass(frozen=True)
class StageMemory:
    """Of one rank of a stage; bytes unless said otherwise."""

    stage: int
    layers: int
    count: Count
    parameters: float
    gradients: float
    optimizer: float
    row: float  # activations that one row keeps in all chunks together
    rows_in_flight: float
    activations: float
    head: float
    working: float
    critic: float  # a value model's parameters, gradients and optimizer
    allowance: float
    host: float  # in host memory: what is offloaded

    @property
    def states(self) -> float:
        """What is there between steps."""
        return self.parameters + self.gradients + self.optimizer + self.critic

    @property
    def total(self) -> float:
        return self.states + self.activations + self.head + self.working + self.allowance


def stage_memory(
    spec: ModelSpec,
    mesh: Mesh,
    stage: int,
    choices: Choices,
    rows: Rows,
    *,
    critic: bool = False,
) -> StageMemory:
    """The most that a rank of ``stage`` holds while it trains on ``rows``."""
    count = stage_count(spec, mesh, stage)
    quantised = quantised_count(spec, mesh, stage, choices.bf16_layers).parameters
    states = _states(count, quantised, mesh, choices)
    kinds = {moe: layer_bytes(spec, mesh, rows, choices, moe=moe) for moe in set(spec.moe_layers)}
    chunks = _chunk_bytes(spec, mesh, stage, kinds, rows, choices)
    passes = chunk_passes(mesh, stage, rows.count)
    last = stage == mesh.pp - 1
    head = head_bytes(spec, mesh, rows, choices) if last else 0.0
    at_once = choices.recompute_layers if choices.recompute_method == "uniform" else 1
    # of the layers that are computed again together, once the logits are gone
    again = at_once * max(kind.again for kind in kinds.values())
    kept = sum(chunks[k] * n for k, n in passes.items())
    return StageMemory(
        stage=stage,
        layers=mesh.stage_layers(spec.layers)[stage],
        count=count,
        **states,
        row=sum(chunks),
        rows_in_flight=sum(passes.values()) / mesh.vpp,
        activations=kept + max(0.0, again - head),
        head=head,
        working=_working(spec, mesh, stage, choices, rows),
        critic=_critic(spec, count, quantised, mesh, stage, choices) if critic else 0.0,
        allowance=ALLOWANCE,
    )


def plan_memory(
    spec: ModelSpec,
    mesh: Mesh,
    choices: Choices,
    rows: Rows,
    *,
    critic: bool = False,
) -> list[StageMemory]:
    """Every stage's [pp]."""
    return [stage_memory(spec, mesh, r, choices, rows, critic=critic) for r in range(mesh.pp)]


def chunk_passes(mesh: Mesh, stage: int, num_rows: int) -> dict[int, int]:
    """Chunk -> rows that have been through it and not back, when they are most."""
    if mesh.vpp == 1:
        return {0: min(num_rows, mesh.pp - stage)}
    most = 2 * (mesh.pp - stage - 1) + (mesh.vpp - 1) * mesh.pp + 1
    begun = range(min(num_rows * mesh.vpp, most))
    return dict(Counter(i // mesh.pp % mesh.vpp for i in begun))


def padding_bound(num_parameters: int, ranks: int) -> int:
    """Numbers that Megatron's alignment adds to a buffer of ``num_parameters`` tensors over
    ``ranks`` ranks, at most.
    """
    return 63 * num_parameters + 128 * ranks


def optimizer_ranks(mesh: Mesh) -> tuple[int, int]:
    """Over how many ranks the distributed optimizer splits the state of shared parameters, and of
    experts.
    """
    return mesh.dp * mesh.cp, mesh.stage_size // (mesh.ep * mesh.etp)


def _states(count: Count, quantised: int, mesh: Mesh, choices: Choices) -> dict[str, float]:
    shared, expert = optimizer_ranks(mesh) if choices.distributed_optimizer else (1, 1)
    optimizer = choices.optimizer_bytes * (count.shared / shared + count.expert / expert)
    parameters = count.parameters * choices.parameter_bytes
    if choices.fp8:
        parameters += (2 - choices.parameter_bytes * choices.fp8_stored) * quantised
    return {
        "parameters": float(parameters + 4 * count.buffers),
        "gradients": float(choices.gradient_bytes * count.trained),
        "optimizer": optimizer * (1 - choices.offloaded),
        "host": optimizer * choices.offloaded,
    }


def _chunk_bytes(
    spec: ModelSpec,
    mesh: Mesh,
    stage: int,
    kinds: dict[bool, LayerBytes],
    rows: Rows,
    choices: Choices,
) -> list[float]:
    """What one row keeps in each chunk of a stage, without the head."""
    found = []
    for k in range(mesh.vpp):
        layers = mesh.layers_of(spec.layers, stage, k)
        of_chunk = spec.moe_layers[layers.start : layers.stop]
        kept = _kept(of_chunk, kinds, choices)
        found.append(kept + (first_bytes(mesh, rows) if stage == k == 0 else 0.0))
    return found


def _kept(of_chunk: tuple[bool, ...], kinds: dict[bool, LayerBytes], choices: Choices) -> float:
    """Of a chunk's layers, by their kinds."""
    n = choices.recompute_layers
    again, whole = of_chunk, of_chunk[:0]
    if choices.recompute == "full" and choices.recompute_method == "uniform":
        again = of_chunk[::n]
    elif choices.recompute == "full":
        again, whole = of_chunk[:n], of_chunk[n:]
    found = 0.0
    for moe, kind in kinds.items():
        found += again.count(moe) * kind.kept + whole.count(moe) * kind.whole
    return found


def _working(spec: ModelSpec, mesh: Mesh, stage: int, choices: Choices, rows: Rows) -> float:
    """Of one matrix product's backward pass."""
    vocab = padded_vocab_size(spec.vocab, VOCAB_MULTIPLE) // mesh.tp
    widest = max(
        vocab if stage == mesh.pp - 1 else 0,
        2 * spec.moe_ffn // mesh.etp,
        0 if all(spec.moe_layers) else 2 * spec.ffn // mesh.tp,
        (spec.heads + 2 * spec.kv_heads) * spec.head_dim // mesh.tp,
    )
    gathered = 2 * rows.tokens // mesh.cp * spec.hidden if mesh.tp > 1 else 0  # input and gradient
    return float(choices.activation_bytes * (widest * spec.hidden + gathered))


def _critic(
    spec: ModelSpec, count: Count, quantised: int, mesh: Mesh, stage: int, choices: Choices
) -> float:
    """A second model of the same layout, with a row of H in place of the output head."""
    shared = count.shared
    if stage == mesh.pp - 1:
        tied_here = spec.tie_embeddings and mesh.pp == 1
        head = padded_vocab_size(spec.vocab, VOCAB_MULTIPLE) // mesh.tp * spec.hidden
        shared += spec.hidden - (0 if tied_here else head)
    states = _states(replace(count, shared=shared), quantised, mesh, choices)
    return states["parameters"] + states["gradients"] + states["optimizer"]
