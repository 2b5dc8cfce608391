"""How the FLOPs of a pass grow with a sequence's length, which is what rows are balanced by.

A matrix product of [n, a] and [a, b] counts 2 n a b. The forward pass of a sequence of n tokens::

    n * per_token   projections of attention, feed-forward matrices of the dense layers, of the
                    experts that were chosen and of the router, and the output head
    n (n + 1) / 2 * pair    causal attention: token t attends to t + 1 tokens, with a product of
                    head_dim for the score and one for the value in every head and layer, so that
                    pair = 4 * layers * heads * head_dim

Norms, softmax and the embedding are left out; a backward pass is twice a forward pass in both terms
and changes nothing of their ratio.
"""

from megarl.models.spec import ModelSpec


def pass_flops(spec: ModelSpec) -> tuple[int, int]:
    """(linear, quadratic): a sequence of n tokens costs ``linear * n + quadratic * n**2``, in units
    of half a pair's FLOPs, which keeps sums over many long sequences small.
    """
    pair = 4 * spec.layers * spec.heads * spec.head_dim
    return round((_per_token(spec) + pair / 2) / (pair / 2)), 1


def _per_token(spec: ModelSpec) -> int:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = spec.layers * spec.hidden * (2 * queries + 2 * keys)  # q, out, k, v
    experts = 3 * spec.hidden * spec.moe_ffn * spec.topk + spec.hidden * spec.experts
    dense = 3 * spec.hidden * spec.ffn  # gate, up, down
    moe = spec.num_moe_layers
    feed_forward = moe * experts + (spec.layers - moe) * dense
    return 2 * (attention + feed_forward + spec.hidden * spec.vocab)
