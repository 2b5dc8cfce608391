"""Specs of published models by hand, and what their publishers say of their size."""

from dataclasses import dataclass

from megarl.models.spec import Mla, ModelSpec


@dataclass(frozen=True)
class Published:
    """``total`` and ``active`` in billions as printed, with their source; None where the publisher
    counts in another way, which a test of its own follows. ``exact``: numbers in the checkpoint of
    the main model, where its files say it.
    """

    spec: ModelSpec
    total: str | None
    active: str | None
    exact: int | None
    source: str


def _qwen3(**dims: object) -> ModelSpec:
    moe = bool(dims.get("experts"))
    values = {
        "family": "qwen3_moe" if moe else "qwen3",
        "head_dim": 128,
        "moe_ffn": 0,
        "experts": 0,
        "topk": 0,
        "vocab": 151936,
        "rope_theta": 1e6,
        "norm_eps": 1e-6,
        "tie_embeddings": False,
        "qk_norm": True,
        "norm_topk_prob": moe,
        "moe_layers": (moe,) * int(str(dims["layers"])),
        "router_score": "softmax",
        "max_positions": 40960,
        "dtype": "bfloat16",
        "eos_ids": (151645,),
    }
    return ModelSpec(**{**values, **dims})


QWEN3_8B = _qwen3(hidden=4096, layers=36, heads=32, kv_heads=8, ffn=12288)
QWEN3_30B = _qwen3(
    hidden=2048, layers=48, heads=32, kv_heads=4, ffn=6144, moe_ffn=768, experts=128, topk=8
)
QWEN3_235B = _qwen3(
    hidden=4096, layers=94, heads=64, kv_heads=4, ffn=12288, moe_ffn=1536, experts=128, topk=8
)
DEEPSEEK_V3 = ModelSpec(
    family="deepseek_v3",
    hidden=7168,
    layers=61,
    heads=128,
    kv_heads=128,
    head_dim=192,
    ffn=18432,
    moe_ffn=2048,
    experts=256,
    topk=8,
    vocab=129280,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=False,
    qk_norm=False,
    norm_topk_prob=True,
    moe_layers=(False,) * 3 + (True,) * 58,
    router_score="sigmoid",
    max_positions=163840,
    dtype="bfloat16",
    eos_ids=(1,),
    mla=Mla(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    routed_scale=2.5,
    router_groups=8,
    router_topk_groups=4,
    expert_bias=True,
    shared_ffn=2048,
    mtp_layers=1,
)
GLM_4_5 = ModelSpec(
    family="glm4_moe",
    hidden=5120,
    layers=92,
    heads=96,
    kv_heads=8,
    head_dim=128,
    ffn=12288,
    moe_ffn=1536,
    experts=160,
    topk=8,
    vocab=151552,
    rope_theta=1e6,
    norm_eps=1e-5,
    tie_embeddings=False,
    qk_norm=True,
    norm_topk_prob=True,
    moe_layers=(False,) * 3 + (True,) * 89,
    router_score="sigmoid",
    max_positions=131072,
    dtype="bfloat16",
    eos_ids=(151329, 151336, 151338),
    rope_share=0.5,
    qkv_bias=True,
    routed_scale=2.5,
    expert_bias=True,
    shared_ffn=1536,
    mtp_layers=1,
)
GPT_OSS_120B = ModelSpec(
    family="gpt_oss",
    hidden=2880,
    layers=36,
    heads=64,
    kv_heads=8,
    head_dim=64,
    ffn=2880,
    moe_ffn=2880,
    experts=128,
    topk=4,
    vocab=201088,
    rope_theta=150000.0,
    norm_eps=1e-5,
    tie_embeddings=False,
    qk_norm=False,
    norm_topk_prob=True,
    moe_layers=(True,) * 36,
    router_score="softmax",
    max_positions=131072,
    dtype="bfloat16",
    eos_ids=(200002,),
    qkv_bias=True,
    out_bias=True,
    sinks=True,
    windows=(128, 0) * 18,
    router_bias=True,
    mlp_bias=True,
    glu_alpha=1.702,
    glu_limit=7.0,
)

PUBLISHED = {
    "qwen3-8b": Published(
        QWEN3_8B,
        "8.2",
        "8.2",
        8_190_735_360,
        "model card; total_size of the safetensors index, 16,381,470,720 bytes of bf16",
    ),
    "qwen3-30b-a3b": Published(
        QWEN3_30B,
        "30.5",
        "3.3",
        30_532_122_624,
        "model card, which cuts 3.35 to 3.3; total_size of the index, 61,064,245,248 bytes",
    ),
    "qwen3-235b-a22b": Published(
        QWEN3_235B,
        "235",
        "22",
        235_093_634_560,
        "model card; total_size of the index, 470,187,269,120 bytes",
    ),
    "deepseek-v3": Published(
        DEEPSEEK_V3,
        "671",
        "37",
        671_026_419_200,
        "README and README_WEIGHTS.md of the checkpoint, main model; its safetensors headers "
        "without the FP8 scales. 36.6 active are with the head and without the embedding",
    ),
    "glm-4.5": Published(
        GLM_4_5,
        None,
        None,
        None,
        "report (arXiv 2508.06471), table 1: 355 in total and 32 active, with the MTP layer and "
        "without the embedding and the output layer",
    ),
    "gpt-oss-120b": Published(
        GPT_OSS_120B,
        "116.83",
        None,
        None,
        "model card (arXiv 2508.10925), table 1: 116.83 in total; 5.13 active, the embedding left "
        "out",
    ),
}
