"""How the FLOPs of a pass grow with a sequence's length, which is what rows are balanced by.

A matrix product of [n, a] and [a, b] counts 2 n a b. The forward pass of a sequence of n tokens::

    n * per_token   projections of attention, feed-forward matrices of the dense layers, of the
                    experts that were chosen, of the shared ones and of the router, and the output
                    head
    n (n + 1) / 2 * pair    causal attention: token t attends to t + 1 tokens, with a product of
                    head_dim for the score and one of value_dim for the value in every head and
                    layer, so that pair = 2 * layers * heads * (head_dim + value_dim)

A layer with a sliding window of w tokens counts as if each token attended to w, and is part of
``per_token``: what it spares at a sequence's beginning is less than w**2 / 2 of its pairs.
Latent attention is counted as training computes it, with keys and values projected up to all heads.
Norms, softmax and the embedding are left out, and layers for multi-token prediction, which are not
computed; a backward pass is twice a forward pass in both terms and changes nothing of their ratio.
"""

from megarl.models.spec import ModelSpec


def pass_flops(spec: ModelSpec) -> tuple[int, int]:
    """(linear, quadratic): a sequence of n tokens costs ``linear * n + quadratic * n**2``, in units
    of half a pair's FLOPs, which keeps sums over many long sequences small.
    """
    windows = spec.windows or (0,) * spec.layers
    pair = _layer_pair(spec) * windows.count(0)
    per_token = _per_token(spec) + _layer_pair(spec) * sum(windows)
    if not pair:  # no layer sees all of a sequence
        return 1, 0
    return round((per_token + pair / 2) / (pair / 2)), 1


def _layer_pair(spec: ModelSpec) -> int:
    return 2 * spec.heads * (spec.head_dim + _value_dim(spec))


def _value_dim(spec: ModelSpec) -> int:
    return spec.mla.value_dim if spec.mla else spec.head_dim


def _per_token(spec: ModelSpec) -> int:
    attention = spec.layers * _projections(spec)
    experts = 3 * spec.hidden * (spec.moe_ffn * spec.topk + spec.shared_ffn)
    router = spec.hidden * (spec.experts + spec.shared_gate)
    dense = 3 * spec.hidden * spec.ffn  # gate, up, down
    moe = spec.num_moe_layers
    feed_forward = moe * (experts + router) + (spec.layers - moe) * dense
    return 2 * (attention + feed_forward + spec.hidden * spec.vocab)


def _projections(spec: ModelSpec) -> int:
    """Entries of a layer's attention matrices, each of which a token meets once."""
    queries = spec.heads * spec.head_dim
    if spec.mla is None:
        return spec.hidden * (2 * queries + 2 * spec.kv_heads * spec.head_dim)  # q, out, k, v
    mla = spec.mla
    query = mla.q_rank * (spec.hidden + queries) if mla.q_rank else spec.hidden * queries
    down = spec.hidden * (mla.kv_rank + mla.rope_dim)
    up = mla.kv_rank * spec.heads * (mla.nope_dim + mla.value_dim)
    return query + down + up + spec.heads * mla.value_dim * spec.hidden
