"""Bytes that move, and time that is idle.

Of an optimizer step of m rows, a rank sends (b bytes a number; t, s, H, K as in ``activations.py``;
a pass that recomputation repeats is sent again)::

    tp    every layer's attention and dense MLP gather and scatter b H t (tp - 1) / tp: twice in the
          forward pass, three times in the backward pass
    cp    keys and values, 2 b K / tp t (cp - 1) forward, and their gradients backward
    ep    tokens to experts and back, 2 b H topk s (ep - 1) / ep forward, as much backward; and
          2 b H topk s (etp - 1) each
    pp    b H s of activations and as much of gradients for each chunk
    dp    once a step: gradients, 4 n (r - 1) / r over the r ranks that have the same parameters,
          and the new parameters, b n (r - 1) / r, of which those that are stored in FP8 take a byte

A pipeline of pp stages idles (pp - 1) / (m vpp) of the time that it works.

A weight push gathers each stage's tensors on its senders, which send them on to the servers under
their published names; nothing of it is padded. Of a rollout's token a trainer rank gets what it
uses of the samples of its own data-parallel rank: the first stage 4 bytes of id, the last these, 1
of mask and 4 of log-prob, and every stage, where routing is recorded, topk ids of 1 or 2 bytes
(more than 256 experts) for each of its own MoE layers. Advantages are computed where they are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.mesh import Mesh
from megarl.models.mapping import VOCAB_MULTIPLE, padded_vocab_size
from megarl.models.spec import ModelSpec
from megarl.plan.choices import Choices, Rows
from megarl.plan.memory import optimizer_ranks
from megarl.plan.parameters import quantised_count, stage_count

NODE_RANKS = 8  # that NVLink connects

_ID_BYTES, _MASK_AND_LOGPROB_BYTES = 4, 1 + 4


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank of the busiest stage sends along one axis in an optimizer step, and whether
    all of it stays inside a node.
    """

    axis: str
    num_bytes: float
    in_node: bool


def bubble(mesh: Mesh, num_rows: int) -> float:
    """Idle time of a pipeline over the time it works."""
    return (mesh.pp - 1) / (num_rows * mesh.vpp)


def step_traffic(spec: ModelSpec, mesh: Mesh, choices: Choices, rows: Rows) -> list[Traffic]:
    """By axis, of the stage with most layers."""
    layers = max(mesh.stage_layers(spec.layers))
    moe = layers * spec.num_moe_layers / spec.layers
    t = rows.tokens / mesh.cp
    s = t / mesh.tp
    hidden = choices.activation_bytes * spec.hidden
    keys = choices.activation_bytes * spec.kv_heads * spec.head_dim / mesh.tp
    routed = hidden * spec.topk * s * ((mesh.ep - 1) / mesh.ep + (mesh.etp - 1))
    # a layer's forward pass is repeated by recomputation; the backward pass gathers once more
    split: float = layers * (5 + 2 * choices.repeats_attention)
    split += (layers - moe) * (5 + 2 * choices.repeats_mlp)
    per_row = {
        "tp": split * hidden * t * (mesh.tp - 1) / mesh.tp,
        "cp": (2 + choices.repeats_attention) * layers * 2 * keys * t * (mesh.cp - 1),
        "ep": (2 + choices.repeats_experts) * moe * 2 * routed,
        "pp": 2 * mesh.vpp * hidden * s if mesh.pp > 1 else 0.0,
    }
    span = {
        "tp": mesh.tp,
        "cp": mesh.tp * mesh.cp,
        "ep": mesh.ep * mesh.etp,
        "pp": mesh.world_size,
    }
    found = [Traffic(axis, n * rows.count, span[axis] <= NODE_RANKS) for axis, n in per_row.items()]
    return [*found, _data_parallel(spec, mesh, choices)]


def _data_parallel(spec: ModelSpec, mesh: Mesh, choices: Choices) -> Traffic:
    counts = {r: stage_count(spec, mesh, r) for r in {0, mesh.pp // 2, mesh.pp - 1}}
    stage = max(counts, key=lambda r: counts[r].trained)
    count = counts[stage]
    moved = choices.gradient_bytes + choices.parameter_bytes
    shared, expert = ((r - 1) / r for r in optimizer_ranks(mesh))
    total = moved * (count.shared * shared + count.expert * expert)
    if choices.fp8_stored:
        stored = quantised_count(spec, mesh, stage, choices.bf16_layers)
        saved = choices.parameter_bytes - 1
        total -= saved * (stored.shared * shared + stored.expert * expert)
    return Traffic("dp", total, mesh.stage_size <= NODE_RANKS)


def pushed_bytes(spec: ModelSpec, mesh: Mesh, stage: int, choices: Choices) -> int:
    """What the senders of a stage send to every server in a weight push: all tensors of the stage
    under their published names. A multi-token prediction layer has the tables that it shares once
    more.
    """
    whole = replace(mesh, tp=1, cp=1, dp=1, ep=1, etp=1)
    count = stage_count(spec, whole, stage)
    first, last = stage == 0, stage == mesh.pp - 1
    table = spec.vocab * spec.hidden
    padding = padded_vocab_size(spec.vocab, VOCAB_MULTIPLE) * spec.hidden - table
    numbers = count.parameters - first * padding
    numbers += spec.mtp_layers * table * first
    if last and not spec.tie_embeddings:
        numbers += spec.mtp_layers * table - padding
    elif last and not first:  # the copy of a tied embedding
        numbers -= table + padding
    return choices.parameter_bytes * numbers + 4 * count.buffers


def gathered_bytes(spec: ModelSpec, mesh: Mesh, stage: int, choices: Choices) -> int:
    """What a rank of the stage that is no sender gives to it, at most: all that it holds."""
    return choices.parameter_bytes * stage_count(spec, mesh, stage).parameters


def rollout_bytes(
    spec: ModelSpec, mesh: Mesh, stage: int, lengths: Sequence[int], *, routing: bool
) -> int:
    """What a rank of a stage uses of samples of these lengths, its data-parallel rank's."""
    last = stage == mesh.pp - 1
    per_token = _ID_BYTES * (stage == 0 or last) + _MASK_AND_LOGPROB_BYTES * last
    total = per_token * sum(lengths)
    if routing:
        layers = [mesh.layers_of(spec.layers, stage, k) for k in range(mesh.vpp)]
        moe = sum(sum(spec.moe_layers[r.start : r.stop]) for r in layers)
        width = (1 if spec.experts <= 256 else 2) * spec.topk * moe
        total += sum(n - 1 for n in lengths) * width  # nothing is routed by the last token
    return total
