"""FLOPs of a pass, counted matrix by matrix."""

import pytest

from megarl.models.flops import pass_flops
from megarl.models.parts import Mla
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


SHARED = {**MOE, "shared_ffn": 24}
LATENT = {  # value heads narrower than keys'
    **SHARED,
    **{"head_dim": 24, "kv_heads": 4, "mla": Mla(20, 12, nope_dim=16, rope_dim=8, value_dim=10)},
}
DIRECT = {**LATENT, "mla": Mla(0, 12, nope_dim=16, rope_dim=8, value_dim=10), "mtp_layers": 1}
DEEPSEEK_V3 = {
    **{"hidden": 7168, "layers": 61, "heads": 128, "kv_heads": 128, "head_dim": 192, "ffn": 18432},
    **{"moe_ffn": 2048, "experts": 256, "topk": 8, "shared_ffn": 2048, "vocab": 129280},
    **{"moe_layers": (False,) * 3 + (True,) * 58, "mtp_layers": 1},
    "mla": Mla(1536, 512, nope_dim=128, rope_dim=64, value_dim=128),
}


def counted(spec: ModelSpec, length: int) -> int:
    """The products of one sequence, one by one: 2 n a b for [n, a] times [a, b]."""

    def product(n: int, a: int, b: int) -> int:
        return 2 * n * a * b

    value_dim = spec.mla.value_dim if spec.mla else spec.head_dim
    total = product(length, spec.hidden, spec.vocab)
    for moe in spec.moe_layers:
        for inputs, outputs in attention_matrices(spec):
            total += product(length, inputs, outputs)
        for seen in range(1, length + 1):  # scores, then values
            total += spec.heads * (product(1, spec.head_dim, seen) + product(1, seen, value_dim))
        width = spec.moe_ffn * spec.topk + spec.shared_ffn if moe else spec.ffn
        total += 3 * product(length, spec.hidden, width)
        total += product(length, spec.hidden, spec.experts) if moe else 0
    return total


def attention_matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    hidden, heads, mla = spec.hidden, spec.heads, spec.mla
    if mla is None:
        widths = (heads, spec.kv_heads, spec.kv_heads, heads)
        return [(hidden, width * spec.head_dim) for width in widths]
    key = mla.nope_dim + mla.rope_dim
    queries = [(hidden, heads * key)]
    if mla.q_rank:
        queries = [(hidden, mla.q_rank), (mla.q_rank, heads * key)]
    return [
        *queries,
        (hidden, mla.kv_rank),
        (hidden, mla.rope_dim),
        (mla.kv_rank, heads * mla.nope_dim),
        (mla.kv_rank, heads * mla.value_dim),
        (heads * mla.value_dim, hidden),
    ]


CASES = {
    "dense": {},
    "experts": MOE,
    "shared": SHARED,
    "latent": LATENT,
    "direct": DIRECT,
    "large": LARGE,
    "deepseek_v3": DEEPSEEK_V3,
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("length", [1, 7, 300, 2000])
def test_a_sequence_costs_what_its_products_cost(changes: dict[str, object], length: int) -> None:
    spec = ModelSpec(**{**vars(DENSE), **changes})  # type: ignore[arg-type]
    linear, quadratic = pass_flops(spec)
    value_dim = spec.mla.value_dim if spec.mla else spec.head_dim
    unit = spec.layers * spec.heads * (spec.head_dim + value_dim)
    estimate = unit * (linear * length + quadratic * length**2)
    assert estimate == pytest.approx(counted(spec, length), rel=0.5 / linear)


GPT_OSS = {  # 20b
    **{"hidden": 2880, "layers": 24, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn": 2880},
    **{"moe_ffn": 2880, "experts": 32, "topk": 4, "vocab": 201088, "moe_layers": (True,) * 24},
    "windows": (128, 0) * 12,
}
WINDOWED = {"small": {**MOE, "windows": (0, 5, 9)}, "gpt_oss": GPT_OSS}


@pytest.mark.parametrize("changes", WINDOWED.values(), ids=WINDOWED)
@pytest.mark.parametrize("length", [1, 7, 100, 300, 2000])
def test_a_window_costs_its_width_for_every_token(changes: dict[str, object], length: int) -> None:
    """Or less, at a sequence's beginning: by what the triangle before the window's width spares."""
    spec = ModelSpec(**{**vars(DENSE), **changes})  # type: ignore[arg-type]
    linear, quadratic = pass_flops(spec)
    a_pair = 4 * spec.heads * spec.head_dim
    estimate = a_pair * spec.windows.count(0) / 2 * (linear * length + quadratic * length**2)
    spared = sum(
        a_pair * max(0, seen - w) - a_pair * max(0, w - seen)
        for w in spec.windows
        for seen in range(1, length + 1)
        if w
    )
    assert estimate == pytest.approx(counted(spec, length) - spared, rel=0.5 / linear)


def test_without_a_layer_that_sees_everything_the_cost_is_linear() -> None:
    spec = ModelSpec(**{**vars(DENSE), "windows": (4, 4, 4)})  # type: ignore[arg-type]
    assert pass_flops(spec) == (1, 0)


def test_the_large_models_attention_costs_as_much_as_all_else_at_15_thousand_tokens() -> None:
    assert pass_flops(ModelSpec(**{**vars(DENSE), **LARGE})) == (15472, 1)  # type: ignore[arg-type]


def test_a_token_of_deepseek_v3_meets_its_37_billion_active_parameters() -> None:
    """Their report's figure counts the embedding too, of which a token meets one row."""
    spec = ModelSpec(**{**vars(DENSE), **DEEPSEEK_V3})  # type: ignore[arg-type]
    linear, _ = pass_flops(spec)
    unit = spec.layers * spec.heads * (192 + 128)
    active = linear * unit / 2 + spec.vocab * spec.hidden
    assert active == pytest.approx(37e9, rel=0.02)
