"""Specs of published models by hand, and what their publishers say of their size."""

from dataclasses import dataclass, replace

from megarl.models.spec import Llama3, Mla, ModelSpec


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


def _dense(**dims: object) -> ModelSpec:
    return replace(QWEN3_8B, qk_norm=False, **dims)  # type: ignore[arg-type]


QWEN25_7B = _dense(
    **{"family": "qwen2", "hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4},
    **{"ffn": 18944, "vocab": 152064, "max_positions": 32768, "qkv_bias": True},
    **{"moe_layers": (False,) * 28},
)
LLAMA_31_8B = _dense(
    **{"family": "llama", "layers": 32, "ffn": 14336, "vocab": 128256, "rope_theta": 5e5},
    **{"llama3": Llama3(8.0, 1.0, 4.0, 8192), "norm_eps": 1e-5, "max_positions": 131072},
    **{"moe_layers": (False,) * 32, "eos_ids": (128001, 128008, 128009)},
)
MISTRAL_7B = _dense(
    **{"family": "mistral", "layers": 32, "ffn": 14336, "vocab": 32000, "rope_theta": 1e4},
    **{"windows": (4096,) * 32, "norm_eps": 1e-5, "max_positions": 32768},
    **{"moe_layers": (False,) * 32, "eos_ids": (2,)},
)
MOONLIGHT = replace(
    DEEPSEEK_V3,
    **{"hidden": 2048, "layers": 27, "heads": 16, "kv_heads": 16, "ffn": 11264, "moe_ffn": 1408},
    **{"experts": 64, "topk": 6, "vocab": 163840, "rope_theta": 5e4, "norm_eps": 1e-5},
    **{"moe_layers": (False, *(True,) * 26), "max_positions": 8192, "eos_ids": (163586,)},
    **{"routed_scale": 2.446, "router_groups": 1, "router_topk_groups": 1, "shared_ffn": 2816},
    mtp_layers=0,
    mla=Mla(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
)
KIMI_K2 = replace(
    DEEPSEEK_V3,
    **{"heads": 64, "kv_heads": 64, "experts": 384, "vocab": 163840, "rope_theta": 5e4},
    **{"moe_layers": (False, *(True,) * 60), "max_positions": 131072, "eos_ids": (163586,)},
    **{"routed_scale": 2.827, "router_groups": 1, "router_topk_groups": 1, "mtp_layers": 0},
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
    "qwen2.5-7b": Published(
        QWEN25_7B,
        None,
        "7.61",
        7_615_616_512,
        "model card, which cuts 7.616 to 7.61; total_size of the index, 15,231,233,024 bytes",
    ),
    "llama-3.1-8b": Published(
        LLAMA_31_8B,
        "8.03",
        "8.03",
        8_030_261_248,
        "total_size of the safetensors index, 16,060,522,496 bytes of bf16",
    ),
    "mistral-7b": Published(
        MISTRAL_7B,
        "7.24",
        "7.24",
        7_241_732_096,
        "v0.1; total_size of the safetensors index, 14,483,464,192 bytes of bf16",
    ),
    "moonlight-16b-a3b": Published(
        MOONLIGHT,
        None,
        None,
        None,
        "report (arXiv 2502.16982): 15.29 in total and 2.24 active, without the embedding and the "
        "output layer",
    ),
    "kimi-k2": Published(
        KIMI_K2,
        "1026",
        "32",
        None,
        "model card: 1 T in total and 32 active; 1.026 T are counted for its quantised files",
    ),
}
