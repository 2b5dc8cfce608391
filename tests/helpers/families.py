"""A tiny random model of every supported family, as transformers saves it, and what it computes.

A row of the parity table is an entry of ``MODELS``. Weights are far from initial values: norms
are not one, biases, and those of the experts' choice, are not zero. Layers behind the last, for
multi-token prediction, are added to the file: transformers drops them. Never imported next to
Megatron, whose CPU patches would change how transformers builds models.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from megarl.models.live_weights import hf_parameters
from megarl.types import Sample

COMMON: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN3 = {"head_dim": 12}
QWEN3_MOE = {
    **QWEN3,
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
SIGMOID_MOE = {
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
DEEPSEEK = {
    **SIGMOID_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 1,
}
GLM = {
    **SIGMOID_MOE,
    "num_experts_per_tok": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
GPT_OSS = {
    "intermediate_size": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 12,
    "sliding_window": 6,
    "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # of six frequencies: one kept, one between
}
KIMI = {
    **DEEPSEEK,
    **{"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    "rope_parameters": {
        **{**YARN, "rope_theta": 50000.0, "beta_fast": 1.0, "beta_slow": 1.0},
        **{"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
DENSE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 12}
CLASSES = {"kimi_k2": "deepseek_v3"}  # model_type that transformers lacks -> that of its class
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (family, changes of COMMON)
    "qwen3": ("qwen3", QWEN3),
    "qwen3 yarn tied": (
        "qwen3",
        {**QWEN3, "rope_parameters": YARN, "tie_word_embeddings": True},
    ),
    "qwen3_moe yarn": ("qwen3_moe", {**QWEN3_MOE, "rope_parameters": YARN}),
    "qwen3_moe tied": ("qwen3_moe", {**QWEN3_MOE, "tie_word_embeddings": True}),
    "deepseek_v3": (
        "deepseek_v3",
        {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3 direct queries": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            **{"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
            **{"num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5},
        },
    ),
    "glm4_moe": ("glm4_moe", GLM),
    "glm4_moe without qk norm": (
        "glm4_moe",
        {
            **GLM,
            **{"use_qk_norm": False, "n_shared_experts": 1, "num_nextn_predict_layers": 2},
        },
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss without yarn": (
        "gpt_oss",
        {
            **GPT_OSS,
            **{"rope_parameters": COMMON["rope_parameters"], "tie_word_embeddings": True},
            **{"num_key_value_heads": 8, "num_experts_per_tok": 4, "swiglu_limit": 3.0},
            "layer_types": [f"{x}_attention" for x in ("full", "sliding", "sliding", "full")],
        },
    ),
    "qwen2": ("qwen2", DENSE),
    "qwen2 windows tied": (
        "qwen2",
        {
            **{"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
        },
    ),
    "llama": ("llama", {**DENSE, "rope_parameters": LLAMA3}),
    "llama biases tied": (
        "llama",
        {**DENSE, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", {**DENSE, "sliding_window": 6}),
    "kimi_k2": ("kimi_k2", KIMI),
}

_WIDE_MOE = {"moe_intermediate_size": 128}
_WIDE_MLA = {
    **_WIDE_MOE,
    **{"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 24, "v_head_dim": 32},
}
_WIDE: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64, **_WIDE_MOE},
    "deepseek_v3": _WIDE_MLA,
    "kimi_k2": _WIDE_MLA,
    "glm4_moe": {"head_dim": 32, **_WIDE_MOE},
    **{family: {"head_dim": 32} for family in ("qwen2", "llama", "mistral")},
}


def wide(name: str) -> dict[str, Any]:
    """Options of ``save_model`` with which every linear of ``MODELS[name]`` is in whole blocks of
    128 x 128, where a server wants them whole.
    """
    family, changes = MODELS[name]
    options = {"hidden_size": 128, "intermediate_size": 256, **_WIDE.get(family, {})}
    if "q_lora_rank" in changes and changes["q_lora_rank"] is None:
        options["q_lora_rank"] = None
    return options


def save_model(
    name: str, folder: Path, dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any
) -> Path:
    """Write ``MODELS[name]``. In bf16, biases of the experts' choice have bits that bf16 lacks."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    family, changes = MODELS[name]
    values = copy.deepcopy({**COMMON, **changes, **options})  # which transformers adds to
    config = AutoConfig.for_model(CLASSES.get(family, family), **values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.copy_(_values(key, tensor))
    model.to(dtype)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):  # which files hold in fp32
            module.e_score_correction_bias = module.e_score_correction_bias.float().add_(1e-4)
    model.save_pretrained(folder)
    if family in CLASSES:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": family}))
    mtp = values.get("num_nextn_predict_layers", 0)
    if mtp:
        _add_mtp(folder / "model.safetensors", values["num_hidden_layers"], mtp)
    return folder


def token_weights(tokens: Sequence[int]) -> NDArray[np.float64]:
    """[L] of order 1 and both signs: by the sample's tokens alone, wherever it stands."""
    return np.random.default_rng(list(tokens)).normal(0.05, 1.0, len(tokens))


def reference_logprobs(folder: Path, samples: Sequence[Sample]) -> list[torch.Tensor]:
    """f64 [L - 1] of every sample: what transformers computes in fp32, one sample at a time."""
    with torch.no_grad():
        model = _load(folder)
        return [_logprobs(model, sample) for sample in samples]


def reference_gradients(folder: Path, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """By transformers and autograd, under the names of files: of the sum over trained tokens of
    ``token_weights`` times log-prob.
    """
    model = _load(folder)
    for sample in samples:
        weights = torch.from_numpy(token_weights(sample.tokens.tolist()) * sample.mask)
        (_logprobs(model, sample) * weights[1:]).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    return {n: t for n, t in hf_parameters(model).items() if "e_score_correction_bias" not in n}


def _load(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads((folder / "config.json").read_text())
    family = values.pop("model_type")
    config = AutoConfig.for_model(CLASSES.get(family, family), **values)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def _logprobs(model: Any, sample: Sample) -> torch.Tensor:
    ids = torch.from_numpy(sample.tokens).long()[None]
    logits = model(ids).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def frozen_names(folder: Path) -> set[str]:
    """HF tensors that a step does not move: biases of the choice, layers behind the last."""
    config = json.loads((folder / "config.json").read_text())
    first, behind = config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    layers = tuple(f"model.layers.{layer}." for layer in range(first, first + behind))
    shared = (".embed_tokens.weight", ".shared_head.head.weight")  # with the model
    return {
        name
        for name in load_file(folder / "model.safetensors")
        if "e_score_correction_bias" in name
        or (name.startswith(layers) and not name.endswith(shared))
    }


_FAMILIES_WITHOUT_EXPERTS = {"llama", "mistral", "qwen2", "qwen3"}
WITHOUT_EXPERTS = {
    name for name, (family, _) in MODELS.items() if family in _FAMILIES_WITHOUT_EXPERTS
}


def _values(key: str, tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(tensor)
    if key.endswith("e_score_correction_bias"):
        return 0.2 * noise
    if tensor.dim() == 1 and key.endswith("weight"):
        return 1 + 0.2 * noise
    if key.endswith("sinks"):
        return 2 * noise
    if key.endswith("gate_up_proj_bias"):
        return 4 * noise  # beyond the clamps
    return (0.5 if "mlp.gate." in key or "mlp.router." in key else 0.15) * noise


def _add_mtp(file: Path, layers: int, mtp: int) -> None:
    """Like the last layer, with other values, and what only these layers have."""
    tensors = load_file(file)
    last = f"model.layers.{layers - 1}."
    hidden = tensors["model.norm.weight"].numel()
    dtype = tensors["model.norm.weight"].dtype
    for layer in range(layers, layers + mtp):
        own = {n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
        shapes = {"enorm": [hidden], "hnorm": [hidden], "shared_head.norm": [hidden]}
        shapes["eh_proj"] = [hidden, 2 * hidden]
        own |= {f"{n}.weight": torch.zeros(s, dtype=dtype) for n, s in shapes.items()}
        own = {n: _values(n, t) for n, t in own.items()}
        own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        own["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        tensors |= {f"model.layers.{layer}.{n}": t for n, t in own.items()}
    save_file(tensors, file, metadata={"format": "pt"})
