"""GPT-OSS: attention with sinks, every other layer within a sliding window, biases on every
projection; experts with a clamped SwiGLU, which files stack in one tensor a layer.

    gate, up = min(gate, limit), clamp(up, -limit, limit)
    out = gate * sigmoid(alpha * gate) * (up + 1)
"""

from megarl.models.config_json import ConfigReader
from megarl.models.mapping import Rule
from megarl.models.rules import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    OUT_BIAS,
    OUT_PROJ,
    PRE_MLP_NORM,
    QKV,
    QKV_BIAS,
)
from megarl.models.spec import ModelSpec
from megarl.models.windows import FULL, SLIDING, layer_windows

ALPHA, LIMIT, ROPE_THETA, HEAD_DIM = 1.702, 7.0, 150000.0, 64  # where config.json lacks them

_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_LAYER, _HF = "decoder.layers.{L}.", "model.layers.{L}."

SINKS = Rule(
    "layer",
    (_LAYER + "self_attention.core_attention.softmax_offset",),
    ((_HF + "self_attn.sinks", ("heads",)),),
    "column",
)
ROUTER = (
    Rule(
        "moe",
        (_LAYER + "mlp.router.weight",),
        ((_HF + "mlp.router.weight", ("experts", "hidden")),),
        "replicated",
    ),
    Rule(
        "moe",
        (_LAYER + "mlp.router.bias",),
        ((_HF + "mlp.router.bias", ("experts",)),),
        "replicated",
    ),
)


def _stacked(name: str, hf: str, dims: tuple[str, ...], operator: str) -> Rule:
    matrix, _, kind = name.partition(".")
    spellings = (
        f"{_LAYER}mlp.experts.local_experts.{{E}}.{matrix}.{kind}",
        f"{_LAYER}mlp.experts.{matrix}.{kind}{{E}}",
    )
    hf_name = f"{_HF}mlp.experts.{hf}"
    return Rule("expert", spellings, ((hf_name, dims),), operator, stacked=True)


EXPERTS = (
    _stacked("linear_fc1.weight", "gate_up_proj", ("hidden", "moe_ffn_twice"), "interleaved"),
    _stacked("linear_fc1.bias", "gate_up_proj_bias", ("moe_ffn_twice",), "interleaved"),
    _stacked("linear_fc2.weight", "down_proj", ("moe_ffn", "hidden"), "transposed_row"),
    _stacked("linear_fc2.bias", "down_proj_bias", ("hidden",), "replicated"),
)


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    attention = (INPUT_NORM, QKV, QKV_BIAS, SINKS, OUT_PROJ, OUT_BIAS, PRE_MLP_NORM)
    return (EMBEDDING, *attention, *ROUTER, *EXPERTS, FINAL_NORM, HEAD)


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    experts = config.count("num_local_experts", "num_experts")
    topk = config.count("num_experts_per_tok", "experts_per_token")
    if topk > experts:
        config.complain("num_experts_per_tok", topk, f"at most num_local_experts={experts}")
    config.architecture("GptOssForCausalLM")
    if not config.flag("attention_bias", default=True):
        config.complain("attention_bias", False, "true")
    config.only("swiglu_alpha", ALPHA)
    config.only("scoring_func", "softmax")
    _refuse_quantised(config)
    common = config.transformer(
        layers,
        head_dim=HEAD_DIM,
        rope_theta=ROPE_THETA,
        reads=("attention_bias", "layer_types", "quantization_config"),
    )
    if common["yarn"] is None and not any(config.values.get(key) for key in _ROPE_KEYS):
        config.complain("rope_parameters", None, "an object; without it transformers takes YaRN's")
    width = config.count("intermediate_size")
    fields = {
        "ffn": width,
        "moe_ffn": width,
        "experts": experts,
        "topk": topk,
        "norm_topk_prob": True,  # softmax over the chosen
        "moe_layers": (True,) * layers,
        "qkv_bias": True,
        "out_bias": True,
        "router_bias": True,
        "mlp_bias": True,
        "sinks": True,
        "windows": layer_windows(config, [(SLIDING, FULL)[i % 2] for i in range(layers)]),
        "glu_alpha": ALPHA,
        "glu_limit": config.check_number("swiglu_limit", config.values.get("swiglu_limit", LIMIT)),
    }
    return ModelSpec(family="gpt_oss", **{**common, "qk_norm": False, **fields})


def _refuse_quantised(config: ConfigReader) -> None:
    found = config.values.get("quantization_config")
    if found is not None:
        method = found.get("quant_method") if isinstance(found, dict) else found
        accepted = (
            "null: weights in bfloat16 or float32. transformers writes them: "
            "from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True)), "
            "then save_pretrained"
        )
        config.complain("quantization_config.quant_method", method, accepted)
