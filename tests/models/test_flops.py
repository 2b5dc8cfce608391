"""FLOPs of a pass, counted matrix by matrix."""

import pytest

from megarl.models.flops import pass_flops
from megarl.models.spec import ModelSpec

DENSE = ModelSpec(
    family="qwen3",
    hidden=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=96,
    moe_ffn=0,
    experts=0,
    topk=0,
    vocab=1000,
    rope_theta=1e6,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
    norm_topk_prob=True,
    moe_layers=(False,) * 3,
    router_score="softmax",
    max_positions=4096,
    dtype="float32",
    eos_ids=(1,),
)
MOE = {"moe_ffn": 16, "experts": 8, "topk": 2, "moe_layers": (True, False, True)}
LARGE = {  # Qwen3-30B-A3B
    **{"hidden": 2048, "layers": 48, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144},
    **{"moe_ffn": 768, "experts": 128, "topk": 8, "vocab": 151936, "moe_layers": (True,) * 48},
}


def counted(spec: ModelSpec, length: int) -> int:
    """The products of one sequence, one by one: 2 n a b for [n, a] times [a, b]."""

    def product(n: int, a: int, b: int) -> int:
        return 2 * n * a * b

    total = product(length, spec.hidden, spec.vocab)
    for moe in spec.moe_layers:
        for width in (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads):
            total += product(length, spec.hidden, width * spec.head_dim)
        for seen in range(1, length + 1):  # scores, then values
            total += 2 * spec.heads * product(1, spec.head_dim, seen)
        width = spec.moe_ffn * spec.topk if moe else spec.ffn
        total += 3 * product(length, spec.hidden, width)
        total += product(length, spec.hidden, spec.experts) if moe else 0
    return total


@pytest.mark.parametrize("changes", [{}, MOE, LARGE], ids=["dense", "experts", "large"])
@pytest.mark.parametrize("length", [1, 7, 300, 2000])
def test_a_sequence_costs_what_its_products_cost(changes: dict[str, object], length: int) -> None:
    spec = ModelSpec(**{**vars(DENSE), **changes})  # type: ignore[arg-type]
    linear, quadratic = pass_flops(spec)
    unit = 2 * spec.layers * spec.heads * spec.head_dim
    estimate = unit * (linear * length + quadratic * length**2)
    assert estimate == pytest.approx(counted(spec, length), rel=0.5 / linear)


def test_the_large_models_attention_costs_as_much_as_all_else_at_15_thousand_tokens() -> None:
    assert pass_flops(ModelSpec(**{**vars(DENSE), **LARGE})) == (15472, 1)  # type: ignore[arg-type]
