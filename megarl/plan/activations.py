"""Bytes that the forward pass of one row keeps for its backward pass, on one rank.

T tokens of a row in sequences of L, t = T / cp of them here, s = t / tp where activations are split
by sequence; b bytes a number; d = topk s etp tokens that come to this rank's experts when these are
equally popular (each of its etp ranks sees them all). H, Q, K, D, I, E as in ``parameters.py``.
Megatron's local layers keep::

    norm(n)        b n on a GPU; on CPU (not fused) its input and output in fp32; 4 a row either way
    attention      norm(H s) + b H s                      input of the q, k, v projection
                   norm(Q t / tp) + norm(K t / tp)        q/k norms; k's input is part of [q; k; v]
                   4 b D t                                cosines and sines, for q and for k
                   b (2 Q + 2 K) t / tp + 4 heads t / tp  q, k, v, output and its log-sum-exp; with
                                                          cp > 1 k and v are of all T tokens
                   8 t                                    order of segments
                   b t L                                  its mask, where causality alone does not
                                                          serve: cp > 1, sinks, windows
                   b Q t / tp                             input of the output projection
    dense MLP      norm(H s) + b H s + b 5 I t / tp       gate and up, silu, up + 0, product, as the
                                                          input of the last matrix
    experts        norm(H s) + b H s + 12 topk s          input, the choice and its weights
                   8 E s + 8 d / etp                      the permutation; its sort keeps all
                   4 E s                                  scores, unless softmax is over the chosen
                   b H d + 4 d + b 6 I d / etp            the last of 6: product times its weight
      shared       b 5 I_shared t / tp
    latent         norm(H s) + b H s + norm(R_q s) + b R_q s + norm(R_kv s) + b R_kv s
                   4 b rope t + b (2 (nope + rope) + 2 value) heads t / tp + b heads value t / tp

    first stage    8 t                                    token ids
    last stage     norm(H s) + b H s + b V t / tp + 56 t  the logits, in time their gradient

Recomputation drops pieces (``RECOMPUTED``) and needs them once, of one layer, in the backward
pass. ``full`` keeps the input of a layer, b H s: of every n-th (uniform; n layers are needed again
at a time), or of the first n of a chunk (block; the others are kept whole).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.mesh import Mesh
from megarl.models.mapping import VOCAB_MULTIPLE, padded_vocab_size
from megarl.models.spec import ModelSpec
from megarl.plan.choices import Choices, Rows

# module that selective recomputation names -> the pieces that are computed again
_EXPERTS = ("choice", "expert_input", "expert_hidden", "expert_product", "shared_hidden")
RECOMPUTED: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("attention_output", "attention_mask"),
    "layernorm": ("attention_input", "mlp_input"),
    "mlp": ("dense_hidden", "dense_product"),
    "moe": _EXPERTS,
    "mla_up_proj": ("attention_operands",),
    "shared_experts": ("shared_hidden",),
}
# Inputs of matrix products, which FP8 keeps quantised: a byte, and an f32 scale for 128 of them.
_QUANTISED = ("attention_input", "projection_input", "dense_product", "expert_input")
_FP8_BYTES = 1 + 4 / 128


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer and one row."""

    kept: float  # from the forward to the backward pass
    again: float  # during the backward pass, by recomputation
    whole: float  # kept without recomputation


@dataclass(frozen=True)
class _Row:
    """The sizes of a row on one rank."""

    t: float
    s: float
    keys: float  # tokens whose keys and values attention holds
    mask: float  # numbers of attention's mask
    b: int
    fused: bool

    @staticmethod
    def of(spec: ModelSpec, mesh: Mesh, rows: Rows, choices: Choices) -> "_Row":
        t = rows.tokens / mesh.cp
        masked = mesh.cp > 1 or spec.sinks or any(spec.windows)
        return _Row(
            t=t,
            s=t / mesh.tp,
            keys=rows.tokens if mesh.cp > 1 else t,
            mask=t * min(rows.sequence, rows.tokens) if masked else 0.0,
            b=choices.activation_bytes,
            fused=choices.fused_norms,
        )

    def norm(self, n: float, rows: float, holds: float | None = None) -> float:
        """A norm of ``n`` numbers in ``rows`` rows. ``holds``: the size of the tensor that its
        input is a part of.
        """
        if self.fused:
            return self.b * (holds or n) + 4 * rows
        return (4 * (holds or n) if self.b == 4 else 4 * n) + 4 * n + 4 * rows


def layer_bytes(
    spec: ModelSpec, mesh: Mesh, rows: Rows, choices: Choices, *, moe: bool
) -> LayerBytes:
    """One layer with experts, or a dense one."""
    row = _Row.of(spec, mesh, rows, choices)
    pieces = _attention(spec, mesh, row)
    pieces |= _experts(spec, mesh, row) if moe else _dense(spec, mesh, row)
    if choices.fp8:
        for name in _QUANTISED:
            pieces[name] = pieces.get(name, 0.0) * _FP8_BYTES / row.b
    everything = sum(pieces.values())
    if choices.recompute == "full":
        return LayerBytes(row.b * spec.hidden * row.s, everything, everything)
    modules = choices.recompute_modules if choices.recompute == "selective" else ()
    dropped = {piece for module in modules for piece in RECOMPUTED[module]}
    again = sum(pieces.get(piece, 0.0) for piece in dropped)
    return LayerBytes(everything - again, again, everything)


def first_bytes(mesh: Mesh, rows: Rows) -> float:
    """Of the embedding: the ids."""
    return 8 * rows.tokens / mesh.cp


def head_bytes(spec: ModelSpec, mesh: Mesh, rows: Rows, choices: Choices) -> float:
    """Of the last norm, the output head and the loss, for one row at a time."""
    row = _Row.of(spec, mesh, rows, choices)
    vocab = padded_vocab_size(spec.vocab, VOCAB_MULTIPLE) / mesh.tp
    hidden = spec.hidden * row.s
    return row.norm(hidden, row.s) + row.b * hidden + row.b * vocab * row.t + 56 * row.t


def _attention(spec: ModelSpec, mesh: Mesh, row: _Row) -> dict[str, float]:
    hidden, heads = spec.hidden * row.s, spec.heads / mesh.tp
    mla = spec.mla
    value = mla.value_dim if mla else spec.head_dim
    groups = heads if mla else spec.kv_heads / mesh.tp
    queries, keys = heads * spec.head_dim, groups * spec.head_dim
    sink = 8 if spec.sinks else 0  # dimensions of queries, keys and values besides their own
    operands = heads * (spec.head_dim + sink) * row.t
    operands += groups * (spec.head_dim + value + 2 * sink) * row.keys
    turned = mla.rope_dim if mla else spec.head_dim * spec.rope_share
    inside = 4 * row.b * turned * row.t
    if mla is not None:
        for rank in (mla.q_rank, mla.kv_rank):
            inside += row.norm(rank * row.s, row.s) + row.b * rank * row.s if rank else 0.0
    elif spec.qk_norm:
        whole = (queries + 2 * keys) * row.t
        inside += row.norm(queries * row.t, heads * row.t)
        inside += row.norm(keys * row.t, groups * row.t, holds=whole)
    return {
        "attention_norm": row.norm(hidden, row.s),
        "attention_input": row.b * hidden,
        "attention_inside": inside,
        "attention_operands": row.b * operands,
        "attention_mask": row.b * row.mask,
        "attention_output": (row.b * heads * (value + sink) + 4 * heads + 8) * row.t,
        "projection_input": row.b * heads * value * row.t,
    }


def _dense(spec: ModelSpec, mesh: Mesh, row: _Row) -> dict[str, float]:
    hidden, inner = spec.hidden * row.s, spec.ffn / mesh.tp * row.t
    return {
        "mlp_norm": row.norm(hidden, row.s),
        "mlp_input": row.b * hidden,
        "dense_hidden": row.b * 4 * inner,
        "dense_product": row.b * inner,
    }


def _experts(spec: ModelSpec, mesh: Mesh, row: _Row) -> dict[str, float]:
    hidden, chosen = spec.hidden * row.s, spec.topk * row.s
    here = chosen * mesh.etp
    inner = spec.moe_ffn / mesh.etp * here
    scores = spec.router_score == "sigmoid" or not spec.norm_topk_prob
    return {
        "mlp_norm": row.norm(hidden, row.s),
        "mlp_input": row.b * hidden,
        "choice": (8 + (4 if scores else 0)) * spec.experts * row.s + 20 * chosen + 4 * here,
        "expert_input": row.b * spec.hidden * here,
        "expert_hidden": row.b * (6 if spec.glu_limit else 4) * inner,  # clamped: both, and a gate
        "expert_product": row.b * 2 * inner,
        "shared_hidden": row.b * 5 * spec.shared_ffn / mesh.tp * row.t,
    }
