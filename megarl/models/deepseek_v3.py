"""DeepSeek-V3: multi-head latent attention with interleaved rotary embedding, and the feed-forward
part of ``sigmoid_moe.py``.
"""

from dataclasses import replace

from megarl.models.config_json import ConfigReader
from megarl.models.mapping import Rule
from megarl.models.parts import Mla
from megarl.models.rules import (
    EMBEDDING_WITH_COPIES,
    INPUT_NORM,
    OUT_PROJ,
)
from megarl.models.sigmoid_moe import BEHIND_ATTENTION, READS, feed_forward
from megarl.models.spec import ModelSpec

LATENT_NORM_EPS = 1e-6  # of transformers and the published code, whatever rms_norm_eps is

# SGLang 0.5.23 makes one matrix of the two (``DeepseekV2WeightLoaderMixin.do_load_weights``), and
# forgets one of which the other does not come in the same call.
_FUSED = "projections to the latents"

_MEGATRON = "decoder.layers.{L}.self_attention."
_HF = "model.layers.{L}.self_attn."


def _projection(
    name: str, hf: str, dims: tuple[str, str], operator: str, together: str | None = None
) -> Rule:
    megatron = (f"{_MEGATRON}{name}.weight",)
    return Rule("layer", megatron, ((f"{_HF}{hf}.weight", dims),), operator, together=together)


def _latent_norm(x: str, dim: str) -> Rule:
    return Rule(
        "layer",
        (
            f"{_MEGATRON}{x}_layernorm.weight",
            f"{_MEGATRON}linear_{x}_up_proj.layer_norm_weight",
        ),
        ((f"{_HF}{x}_a_layernorm.weight", (dim,)),),
        "replicated",
    )


DIRECT_QUERIES = (_projection("linear_q_proj", "q_proj", ("q", "hidden"), "column"),)
LATENT_QUERIES = (
    _projection("linear_q_down_proj", "q_a_proj", ("q_rank", "hidden"), "replicated", _FUSED),
    _latent_norm("q", "q_rank"),
    _projection("linear_q_up_proj", "q_b_proj", ("q", "q_rank"), "column"),
)
KEYS_AND_VALUES = (
    _projection(
        *("linear_kv_down_proj", "kv_a_proj_with_mqa", ("kv_rank_and_rope", "hidden")),
        *("replicated", _FUSED),
    ),
    _latent_norm("kv", "kv_rank"),
    _projection("linear_kv_up_proj", "kv_b_proj", ("keys_and_values", "kv_rank"), "column"),
)
OUTPUT = replace(OUT_PROJ, hf=((OUT_PROJ.hf[0][0], ("hidden", "values")),))


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    assert spec.mla is not None
    return (
        EMBEDDING_WITH_COPIES,
        replace(INPUT_NORM, megatron=INPUT_NORM.megatron[:1]),
        *(LATENT_QUERIES if spec.mla.q_rank else DIRECT_QUERIES),
        *KEYS_AND_VALUES,
        OUTPUT,
        *BEHIND_ATTENTION,
    )


def read(config: ConfigReader) -> ModelSpec:
    layers = config.count("num_hidden_layers")
    config.architecture("DeepseekV3ForCausalLM")
    config.only("rope_interleave", True)
    mla = Mla(
        q_rank=config.count("q_lora_rank", default=0),
        kv_rank=config.count("kv_lora_rank"),
        nope_dim=config.count("qk_nope_head_dim"),
        rope_dim=config.count("qk_rope_head_dim"),
        value_dim=config.count("v_head_dim"),
        norm_eps=LATENT_NORM_EPS,
    )
    common = config.transformer(layers, head_dim=mla.rope_dim, reads=READS)
    if common["kv_heads"] != common["heads"]:
        accepted = f"num_attention_heads={common['heads']}"
        config.complain("num_key_value_heads", common["kv_heads"], accepted)
    if common["head_dim"] != mla.rope_dim:  # which transformers writes there
        config.complain("head_dim", common["head_dim"], f"qk_rope_head_dim={mla.rope_dim}")
    fields = {**common, "head_dim": mla.nope_dim + mla.rope_dim, "qk_norm": False, "mla": mla}
    return ModelSpec(family="deepseek_v3", **{**fields, **feed_forward(config, layers)})
