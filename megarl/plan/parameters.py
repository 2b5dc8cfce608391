"""How many parameters a model has, and how many of them a rank holds.

Closed formulas from the dimensions, independent of the tables that map weight names. Letters: H
hidden, D head dim, Q = heads * D, K = kv_heads * D, I an MLP's width, E experts, V vocabulary.
Of one layer, a rank of a layout holds::

    norms               2 H                                              whole
    attention           (2 Q + 2 K) H / tp                               q, out; k, v
      qk_norm           2 D                                              whole
      qkv_bias          (Q + 2 K) / tp        out_bias  H                the latter whole
      output_gate       Q H / tp              sinks     heads / tp
    latent attention    R_q H + R_q + R_q Q / tp    or Q H / tp          queries; down whole
                        (R_kv + rope) H + R_kv + R_kv heads (nope + value) / tp
                        heads value H / tp                               out
    dense MLP           3 H I / tp
    experts             E H + E / ep * 3 H I / etp                       the router whole
      shared experts    3 H I_shared / tp     shared_gate  H             the latter whole
      router_bias       E                     mlp_bias  E / ep * (2 I / etp + H)

The first stage adds the embedding, V H / tp, the last the output head, as much, and the last norm,
H. Tied, the head is the embedding, of which the last of several stages has a copy. V is padded in
training (``mapping.VOCAB_MULTIPLE``) and is not in a published total. Layers of multi-token
prediction lie on the last stage and are not trained: a layer each, a projection of two hidden
states to one, 2 H H / tp, and three norms, 3 H.
"""

from dataclasses import dataclass

from megarl.errors import DataError
from megarl.mesh import Mesh
from megarl.models.mapping import VOCAB_MULTIPLE, padded_vocab_size
from megarl.models.spec import ModelSpec


@dataclass(frozen=True)
class Count:
    """Parameters of a rank by the ranks that have the same ones, and what is not trained."""

    shared: int = 0  # replicated over dp * cp ranks
    expert: int = 0  # replicated over tp * cp * dp / (ep * etp) ranks
    frozen: int = 0  # in no gradient buffer and no optimizer
    buffers: int = 0  # fp32 numbers that are no parameters (the expert bias)

    @property
    def trained(self) -> int:
        return self.shared + self.expert

    @property
    def parameters(self) -> int:
        return self.shared + self.expert + self.frozen

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.shared + other.shared,
            self.expert + other.expert,
            self.frozen + other.frozen,
            self.buffers + other.buffers,
        )

    def times(self, n: int) -> "Count":
        return Count(self.shared * n, self.expert * n, self.frozen * n, self.buffers * n)


def layer_count(spec: ModelSpec, mesh: Mesh, *, moe: bool) -> Count:
    """One layer, with experts or dense, on one rank."""
    if any(spec.linear_layers):
        raise DataError(f"{spec.family} has layers of linear attention, which cannot be planned")
    attention = _latent_attention if spec.mla is not None else _attention
    shared = 2 * spec.hidden + attention(spec, mesh.tp)
    if moe:
        return Count(shared=shared) + _experts(spec, mesh)
    return Count(shared=shared + 3 * spec.hidden * spec.ffn // mesh.tp)


def stage_count(spec: ModelSpec, mesh: Mesh, stage: int) -> Count:
    """What every rank of pipeline stage ``stage`` holds, all its chunks."""
    ranges = [mesh.layers_of(spec.layers, stage, k) for k in range(mesh.vpp)]
    moe = sum(sum(spec.moe_layers[r.start : r.stop]) for r in ranges)
    dense = sum(map(len, ranges)) - moe
    found = _ends(spec, mesh, first=stage == 0, last=stage == mesh.pp - 1)
    if moe:
        found += layer_count(spec, mesh, moe=True).times(moe)
    if dense:
        found += layer_count(spec, mesh, moe=False).times(dense)
    return found


def quantised_count(
    spec: ModelSpec, mesh: Mesh, stage: int, bf16_layers: tuple[int, int] = (0, 0)
) -> Count:
    """Of those, the matrices of layers that FP8 quantises: all but the router's, without the first
    and last ``bf16_layers``.
    """
    first, end = bf16_layers[0], spec.layers - bf16_layers[1]
    ranges = [mesh.layers_of(spec.layers, stage, k) for k in range(mesh.vpp)]
    inside = [spec.moe_layers[n] for r in ranges for n in r if first <= n < end]
    moe, attention = sum(inside), _attention_matrices(spec, mesh.tp)
    wide = 3 * spec.hidden // mesh.tp
    shared = len(inside) * attention + wide * (moe * spec.shared_ffn)
    shared += wide * (len(inside) - moe) * spec.ffn
    expert = spec.experts // mesh.ep * 3 * spec.hidden * spec.moe_ffn // mesh.etp if moe else 0
    return Count(shared=shared, expert=moe * expert)


def _ends(spec: ModelSpec, mesh: Mesh, *, first: bool, last: bool) -> Count:
    """What is outside the layers."""
    vocab = padded_vocab_size(spec.vocab, VOCAB_MULTIPLE) * spec.hidden // mesh.tp
    tables = first + (last and not (spec.tie_embeddings and first))
    count = Count(shared=vocab * tables + (spec.hidden if last else 0))
    return count + (_mtp(spec, mesh) if last and spec.mtp_layers else Count())


def _mtp(spec: ModelSpec, mesh: Mesh) -> Count:
    layer = layer_count(spec, mesh, moe=spec.experts > 0)
    extra = 2 * spec.hidden * spec.hidden // mesh.tp + 3 * spec.hidden
    frozen = spec.mtp_layers * (layer.trained + extra)
    return Count(frozen=frozen, buffers=spec.mtp_layers * layer.buffers)


def total_parameters(spec: ModelSpec) -> int:
    """Of the whole model as published: every number of its checkpoint's tensors, the expert bias
    included, without multi-token prediction and without padding.
    """
    one = Mesh()
    moe = spec.num_moe_layers
    layers = [
        layer_count(spec, one, moe=kind).times(n)
        for kind, n in ((True, moe), (False, spec.layers - moe))
        if n
    ]
    tables = 1 if spec.tie_embeddings else 2
    ends = tables * spec.vocab * spec.hidden + spec.hidden
    return sum(count.trained + count.buffers for count in layers) + ends


def active_parameters(spec: ModelSpec) -> int:
    """Of those, what one token is multiplied with: its ``topk`` experts of every MoE layer, and of
    the embedding and the head the whole tables.
    """
    idle = spec.num_moe_layers * (spec.experts - spec.topk) * _expert(spec, 1)
    return total_parameters(spec) - idle


def mtp_parameters(spec: ModelSpec) -> int:
    """Of the multi-token prediction layers in a checkpoint, the expert bias included, the tables
    that they share with the model left out.
    """
    if not spec.mtp_layers:
        return 0
    count = _mtp(spec, Mesh())
    return count.frozen + count.buffers


def _attention(spec: ModelSpec, tp: int) -> int:
    split = spec.heads * spec.head_dim + 2 * spec.kv_heads * spec.head_dim if spec.qkv_bias else 0
    split += spec.heads if spec.sinks else 0
    whole = 2 * spec.head_dim if spec.qk_norm else 0
    whole += spec.hidden if spec.out_bias else 0
    return _attention_matrices(spec, tp) + split // tp + whole


def _latent_attention(spec: ModelSpec, tp: int) -> int:
    assert spec.mla is not None
    return _attention_matrices(spec, tp) + spec.mla.kv_rank + spec.mla.q_rank


def _attention_matrices(spec: ModelSpec, tp: int) -> int:
    queries, keys, mla = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.mla
    if mla is None:
        split = (2 * queries + 2 * keys) * spec.hidden
        return (split + (queries * spec.hidden if spec.output_gate else 0)) // tp
    whole = (mla.kv_rank + mla.rope_dim + mla.q_rank) * spec.hidden
    split = mla.kv_rank * spec.heads * (mla.nope_dim + mla.value_dim)
    split += spec.heads * mla.value_dim * spec.hidden
    split += queries * (mla.q_rank or spec.hidden)
    return split // tp + whole


def _experts(spec: ModelSpec, mesh: Mesh) -> Count:
    router = spec.experts * spec.hidden + (spec.experts if spec.router_bias else 0)
    shared = 3 * spec.hidden * spec.shared_ffn // mesh.tp
    gate = spec.hidden if spec.shared_ffn and spec.shared_gate else 0
    return Count(
        shared=router + shared + gate,
        expert=spec.experts // mesh.ep * _expert(spec, mesh.etp),
        buffers=spec.experts if spec.expert_bias else 0,
    )


def _expert(spec: ModelSpec, etp: int) -> int:
    bias = 2 * spec.moe_ffn // etp + spec.hidden if spec.mlp_bias else 0
    return 3 * spec.hidden * spec.moe_ffn // etp + bias
